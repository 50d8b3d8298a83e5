"""One optimizer or several, and what is no model or no optimizer."""

import pytest
import torch
from torch import nn

import zoo
from tests.zoo.auditing.steps import lines, told
from zoo.errors import ZooError


@pytest.fixture
def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def split(layers: nn.Sequential) -> list[torch.optim.Optimizer]:
    """Give the matrices to one optimizer and the biases to another, as Muon and AdamW share a model."""
    matrices = [parameter for parameter in layers.parameters() if parameter.ndim > 1]
    biases = [parameter for parameter in layers.parameters() if parameter.ndim == 1]
    return [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(biases, lr=0.01)]


def step(layers: nn.Sequential, optimizers: list[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    layers(torch.ones(2, 4)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()


@pytest.mark.parametrize("kind", [list, tuple])
def test_what_any_of_two_optimizers_holds_is_held(layers, kind) -> None:
    optimizers = split(layers)
    assert zoo.audit(layers, kind(optimizers)).findings == ()
    assert [finding.tensor for finding in zoo.audit(layers, optimizers[0]).errors] == ["0.bias", "1.bias"]
    assert [finding.tensor for finding in zoo.audit(layers, []).errors] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_parameter_that_two_optimizers_hold_is_named_with_both(layers) -> None:
    optimizers = [*split(layers), torch.optim.SGD([layers[1].bias], lr=0.1)]
    assert lines(zoo.audit(layers, optimizers)) == [
        "error: optimizer: 1.bias: is held 2 times, in optimizer 1's group 0 and optimizer 2's group 0: each step "
        "would move it so often"
    ]


def test_orphan_is_named_by_its_optimizer_and_place(layers) -> None:
    optimizers = split(layers)
    layers[1].bias = nn.Parameter(torch.zeros(2))
    missing, orphan = lines(zoo.audit(layers, optimizers))
    assert missing.startswith("error: optimizer: 1.bias: is trainable and in no optimizer group")
    assert orphan.startswith("error: optimizer: optimizer 1's group 0, tensor 1: of shape (2,) is held by")


def test_snapshot_records_the_steps_of_two_optimizers_as_rounds(layers) -> None:
    optimizers = split(layers)
    before = zoo.snapshot(layers, optimizers)
    for _ in range(3):
        step(layers, optimizers)
    assert zoo.audit(layers, optimizers, before=before).findings == ()
    assert before.steps == 3
    assert {name: trace.learning_rate for name, trace in before.traces.items()} == {
        "0.weight": 0.1,
        "0.bias": 0.01,
        "1.weight": 0.1,
        "1.bias": 0.01,
    }
    step(layers, optimizers)
    assert before.steps == 3  # the audit took its hooks off both


def test_write_between_the_steps_of_two_optimizers_is_named(layers) -> None:
    optimizers = split(layers)
    before = zoo.snapshot(layers, optimizers)
    for _ in range(3):
        step(layers, optimizers)
        nn.init.normal_(layers[0].weight)
    (found,) = told(zoo.audit(layers, optimizers, before=before), "rewritten")
    assert found.startswith("error: rewritten: 0.weight: was written to by something else than the optimizer")


@pytest.mark.parametrize(("act", "verb"), [(zoo.audit, "the audit"), (zoo.snapshot, "the snapshot")])
def test_what_is_no_model_or_no_optimizer_is_refused_in_one_line(layers, act, verb) -> None:
    for model, got in ((nn.Linear, "the class Linear: make one of it first"), ("vit", "'vit'"), ([layers], "a list")):
        with pytest.raises(ZooError, match=rf"^{verb} wants a model, an nn\.Module, got {got}$"):
            act(model)
    for optimizer, got in (
        ("adam", "'adam'"),
        (torch.optim.AdamW, "the class AdamW"),
        (layers.parameters(), "a generator"),
        (layers, "a Sequential"),
        ([torch.optim.SGD(layers.parameters(), lr=0.1), None], "None at place 1"),
    ):
        with pytest.raises(ZooError, match=rf"^{verb} wants an optimizer, or a list of them, got {got}: it has no"):
            act(layers, optimizer)
    for parameter in layers.parameters():
        assert parameter._post_accumulate_grad_hooks is None  # nothing was hung on a model that was refused
