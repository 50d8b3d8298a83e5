"""What a snapshot tells of an init pass, and of writes not the optimizer's; training is in test_snapshots.py."""

import json

import pytest
import torch
from torch import Tensor, nn

import zoo
from zoo.errors import ZooError


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return zoo.create_model(
        "vit_tiny_patch16_224",
        "parameter",
        img_size=32,
        patch_size=8,
        embed_dim=32,
        depth=2,
        num_heads=2,
        num_classes=3,
        seed=0,
    )


def told(report, *checks: str) -> list[str]:
    return [str(finding) for finding in report.findings if finding.check in checks]


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    nn.functional.cross_entropy(model(images), torch.tensor([0, 1, 2, 0])).backward()
    optimizer.step()


# --- an init pass


def test_init_function_that_looks_for_parameters_never_runs(model) -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Parameter):
            nn.init.kaiming_uniform_(module)

    before = zoo.snapshot(model)
    model.apply(init)
    (found,) = told(zoo.audit(model, before=before), "init")
    assert found.startswith("error: init: nothing reached a parameter")
    assert "Module.apply hands its function modules, so that isinstance(m, nn.Parameter) never holds" in found


def test_init_function_for_linear_layers_leaves_raw_parameters_which_are_named_in_one_finding(model) -> None:
    def init(module: nn.Module) -> None:
        if type(module) is nn.Linear or isinstance(module, nn.Conv2d | nn.LayerNorm):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
        elif hasattr(module, "cls_token"):
            nn.init.normal_(module.cls_token)
            nn.init.normal_(module.pos_embed)

    before = zoo.snapshot(model)
    model.apply(init)
    report = zoo.audit(model, before=before)
    (found,) = told(report, "init")
    raw = [name for name, _ in model.named_parameters() if ".attn." in name]
    assert f"the init pass left {len(raw)} of {len(list(model.parameters()))} parameters untouched: " in found
    assert ", ".join(raw) in found
    assert found.startswith("warning")
    assert told(report, "progress") == []


def test_few_parameters_left_by_an_init_pass_are_findings_of_their_own(model) -> None:
    before = zoo.snapshot(model)
    for name, parameter in model.named_parameters():
        if name != "blocks.1.attn.proj.projection":
            nn.init.normal_(parameter)
    report = zoo.audit(model, before=before)
    assert [finding.tensor for finding in report.findings if finding.check == "init"] == [
        "blocks.1.attn.proj.projection"
    ]
    assert "was left untouched by the init pass" in str(report)


def test_writing_the_same_values_counts_as_touching(model) -> None:
    before = zoo.snapshot(model)
    for parameter in model.parameters():
        nn.init.ones_(parameter) if parameter.ndim == 1 and bool((parameter == 1).all()) else nn.init.normal_(parameter)
    assert told(zoo.audit(model, before=before), "init") == []


def test_init_through_data_is_seen_by_the_bytes(model) -> None:
    zoo.freeze(model, "head")
    before = zoo.snapshot(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for parameter in model.parameters():
        parameter.data.normal_()
    assert told(zoo.audit(model, before=before), "init", "progress") == []


def test_frozen_parameters_belong_to_an_init_pass_too(model) -> None:
    zoo.freeze(model, "head.weight")
    before = zoo.snapshot(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    assert [finding.tensor for finding in zoo.audit(model, before=before).findings if finding.check == "init"] == [
        "head.weight"
    ]


def test_long_list_of_untouched_parameters_is_cut() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(60)))
    before = zoo.snapshot(model)
    nn.init.ones_(model[0].weight)
    (found,) = told(zoo.audit(model, before=before), "init")
    assert "left 59 of 60 parameters untouched: 1.weight, 2.weight" in found
    assert "40.weight and 19 more" in found


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


@pytest.mark.parametrize("write", [lambda p: p.clamp_(-0.04, 0.04), lambda p: p.div_(p.norm()), lambda p: p.mul_(0.99)])
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


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_optimizers_own_writes_are_no_rewrites(model, kind) -> None:
    optimizer = kind(model.parameters(), lr=0.5)  # far enough that the values have nothing in common any more
    before = zoo.snapshot(model, optimizer)
    for _ in range(3):
        step(model, optimizer)
        model.eval()
        zoo.audit(model)
    assert told(zoo.audit(model, optimizer, before=before), "rewritten") == []


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
