"""What a snapshot tells of writes that are not the optimizer's; of training itself in test_audit_training.py."""

import json

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.zoo.auditing.steps import told
from zoo.errors import ZooError


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    nn.functional.cross_entropy(model(images), torch.tensor([0, 1, 2, 0])).backward()
    optimizer.step()


# --- writes between the steps


def draw(parameter: Tensor) -> None:
    nn.init.normal_(parameter, std=0.02)


def draw_data(parameter: Tensor) -> None:
    parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))


def zero(parameter: Tensor) -> None:
    nn.init.zeros_(parameter)


@pytest.mark.parametrize("write", [draw, draw_data, zero])
@pytest.mark.parametrize("place", ["before the first step", "after step 1", "after step 2"])
def test_parameter_initialised_again_in_the_loop_is_an_error(model, write, place) -> None:
    name = "blocks.0.attn.qkv.to_q"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = zoo.snapshot(model, optimizer)
    for when in ("before the first step", "after step 1", "after step 2"):
        if when == place:
            write(dict(model.named_parameters())[name])
        if when != "after step 2":
            step(model, optimizer)
    report = zoo.audit(model, optimizer, before=before)
    (found,) = told(report, "rewritten")
    assert found.startswith(
        f"error: rewritten: {name}: was written to by something else than the optimizer (1 times; {place}"
    )
    assert "it is initialised again while it trains, and what it learned is lost" in found


def test_whole_model_initialised_again_in_each_step_is_named_tensor_by_tensor(model) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    before = zoo.snapshot(model, optimizer)
    for _ in range(2):
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        step(model, optimizer)
    report = zoo.audit(model, optimizer, before=before)
    assert len(told(report, "rewritten")) == len(list(model.parameters()))
    assert "(2 times" in told(report, "rewritten")[0]


@pytest.mark.parametrize("write", [lambda p: p.clamp_(-0.04, 0.04), lambda p: p.clamp_(min=0), lambda p: p.mul_(0.99)])
def test_clipping_and_rescaling_between_the_steps_are_a_warning(model, write) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = zoo.snapshot(model, optimizer)
    for _ in range(2):
        step(model, optimizer)
        with torch.no_grad():
            write(model.patch_embed.proj.weight)
    (found,) = told(zoo.audit(model, optimizer, before=before), "rewritten")
    assert found.startswith("warning: rewritten: patch_embed.proj.weight: was written to by something else")
    assert found.endswith("clipped, rescaled or loaded; is it meant?")


def test_likeness_is_to_the_values_that_the_last_step_left(model) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)  # far from where they were at the snapshot
    before = zoo.snapshot(model, optimizer)
    step(model, optimizer)
    with torch.no_grad():
        model.patch_embed.proj.weight.mul_(0.99)
    (found,) = told(zoo.audit(model, optimizer, before=before), "rewritten")
    assert "(1 times; after step 1 the values stayed alike, cosine 1.000)" in found


def test_draw_of_a_part_is_seen_wherever_it_lies(model) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = zoo.snapshot(model, optimizer)
    step(model, optimizer)
    nn.init.normal_(model.patch_embed.proj.weight.data[4:])
    (found,) = told(zoo.audit(model, optimizer, before=before), "rewritten")
    assert found.startswith("error: rewritten: patch_embed.proj.weight")


def test_write_of_another_shape_is_like_nothing_before(model) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = zoo.snapshot(model, optimizer)
    step(model, optimizer)
    model.cls_token.data = torch.ones(1, 1, 8)
    (found,) = told(zoo.audit(model, optimizer, before=before), "rewritten")
    assert found.startswith("error: rewritten: cls_token")
    assert "cosine of 0.00" in found


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_optimizers_own_writes_are_no_rewrites(model, kind) -> None:
    optimizer = kind(model.parameters(), lr=0.5)  # far enough that the values have nothing in common any more
    before = zoo.snapshot(model, optimizer)
    for _ in range(3):
        step(model, optimizer)
        model.eval()
        zoo.audit(model)
    assert told(zoo.audit(model, optimizer, before=before), "rewritten") == []


def test_worst_of_several_writes_is_told(model) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = zoo.snapshot(model, optimizer)
    for write in (lambda p: p.mul_(0.99), nn.init.normal_, lambda p: p.mul_(0.99)):
        step(model, optimizer)
        with torch.no_grad():
            write(model.cls_token)
    (found,) = told(zoo.audit(model, optimizer, before=before), "rewritten")
    assert found.startswith("error: rewritten: cls_token: was written to by something else than the optimizer (3 times")
    assert "after step 2" in found


def test_parameter_written_to_and_then_replaced_is_told_as_replaced(model) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = zoo.snapshot(model, optimizer)
    step(model, optimizer)
    nn.init.normal_(model.cls_token)
    model.cls_token = nn.Parameter(model.cls_token.detach().clone())
    report = zoo.audit(model, optimizer, before=before)
    assert (len(told(report, "rewritten")), len(told(report, "replaced"))) == (0, 1)


def test_what_is_written_after_the_recording_is_not_told(model) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = zoo.snapshot(model, optimizer)
    step(model, optimizer)
    before.close()
    nn.init.normal_(model.head.weight)
    assert told(zoo.audit(model, optimizer, before=before), "rewritten") == []


# --- frozen, and other kinds of parameters


def test_frozen_parameter_that_an_old_gradient_moves_is_an_error(model) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, optimizer)
    zoo.freeze(model, "head")
    before = zoo.snapshot(model, optimizer)
    optimizer.zero_grad(set_to_none=False)  # leaves zeros, on which momentum goes on
    images = torch.ones(1, 3, 32, 32)
    model(images).sum().backward()
    optimizer.step()
    found = told(zoo.audit(model, optimizer, before=before), "frozen")
    assert [line.split(": ")[2] for line in found] == ["head.weight", "head.bias"]
    assert "was frozen at the snapshot and has changed" in found[0]


def test_parameter_unfrozen_since_the_snapshot_may_move(model) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zoo.freeze(model, "head")
    before = zoo.snapshot(model, optimizer)
    zoo.unfreeze(model, "head")
    step(model, optimizer)
    assert told(zoo.audit(model, optimizer, before=before), "frozen") == []


def test_sparse_gradients_are_followed() -> None:
    model = nn.Embedding(5, 3, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = zoo.snapshot(model, optimizer)
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    assert before.traces["weight"].largest_gradient == 1.0
    assert zoo.audit(model, optimizer, before=before).findings == ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_parameters_of_any_dtype_are_followed(dtype) -> None:
    model = nn.Linear(3, 3, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = zoo.snapshot(model, optimizer)
    for _ in range(2):
        model(torch.ones(1, 3, dtype=dtype)).abs().sum().backward()
        optimizer.step()
    assert zoo.audit(model, optimizer, before=before).findings == ()


@pytest.mark.parametrize("build", [lambda: nn.LazyLinear(3), lambda: nn.Linear(2, 2, device="meta")])
def test_snapshot_of_a_model_without_values_says_so(build) -> None:
    with pytest.raises(ZooError, match="weight has no values yet"):
        zoo.snapshot(build())


def test_report_of_everything_is_json_and_back(model) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = zoo.snapshot(model, optimizer)
    step(model, optimizer)
    nn.init.constant_(model.blocks[0].attn.qkv.to_q, float("nan"))  # a scale that is not a number is left out
    report = zoo.audit(model, optimizer, before=before, batch=torch.ones(2, 3, 32, 32))
    said = report.to_dict()
    assert json.loads(json.dumps(said, allow_nan=False)) == said
    assert [row["name"] for row in said["attentions"]] == ["blocks.1.attn"]
    assert said["findings"][0].keys() == {"check", "severity", "tensor", "message"}
