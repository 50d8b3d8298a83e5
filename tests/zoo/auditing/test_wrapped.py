"""The audit of a model that changed after it was wrapped for DDP, and of one that did not."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import zoo
from tests.zoo.auditing.steps import train


@pytest.fixture
def group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def told(model: nn.Module) -> list[str]:
    return [str(finding) for finding in zoo.audit(model).findings if finding.severity != "note"]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("pattern", ["", "blocks.0"])
def test_fresh_wrapper_is_silent_before_and_after_it_trains(model, pattern) -> None:
    if pattern:
        zoo.freeze(model, pattern)
    wrapper = DistributedDataParallel(model)
    assert told(wrapper) == []
    train(wrapper, torch.optim.SGD(model.parameters(), lr=0.1), steps=3)  # DDP orders its buckets anew
    assert told(wrapper) == []
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.usefixtures("group")
def test_attention_swapped_under_the_wrapper_is_named_once(vit) -> None:
    wrapper = DistributedDataParallel(vit)
    zoo.swap_attention(wrapper.module, "parameter")
    assert told(wrapper) == [
        "error: wrapper: blocks.0.attn.qkv.to_q: this and 15 others were not there when the model was wrapped, so that "
        "each rank trains its own. DDP was built before this change: wrap again"
    ]
    assert told(DistributedDataParallel(vit)) == []


@pytest.mark.usefixtures("group")
def test_parameters_frozen_under_the_wrapper_are_named_unless_it_looks_for_unused_ones(vit) -> None:
    wrapper, looks = DistributedDataParallel(vit), DistributedDataParallel(vit, find_unused_parameters=True)
    zoo.freeze(vit, "blocks.0")
    (found,) = told(wrapper)
    assert found.startswith("error: wrapper: blocks.0.norm1.weight: this and 11 others were trainable when")
    assert found.endswith("waits for a gradient that never comes. DDP was built before this change: wrap again")
    assert told(looks) == []
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        train(wrapper, torch.optim.SGD(vit.parameters(), lr=0.1), steps=2)


@pytest.mark.usefixtures("group")
def test_parameter_unfrozen_under_the_wrapper_is_named(vit) -> None:
    zoo.freeze(vit, "head")
    wrapper = DistributedDataParallel(vit)
    zoo.unfreeze(vit, "head.bias")
    assert told(wrapper) == [
        "error: wrapper: head.bias: this was frozen when the model was wrapped, so that each rank trains its own. "
        "DDP was built before this change: wrap again"
    ]


@pytest.mark.usefixtures("group")
def test_layer_removed_under_the_wrapper_is_told_by_its_shape(vit) -> None:
    wrapper = DistributedDataParallel(vit)
    vit.head = nn.Identity()
    (found,) = told(wrapper)
    assert found.startswith(
        "error: wrapper: holds 2 parameters that are not the model's any more, the first of shape ("
    )
    assert found.endswith("DDP was built before this change: wrap again")


@pytest.mark.usefixtures("group")
def test_compiled_models_inside_and_outside_of_the_wrapper_are_looked_through(vit) -> None:
    wrappers = [
        torch.compile(DistributedDataParallel(vit), backend="eager"),
        DistributedDataParallel(torch.compile(vit, backend="eager")),
    ]
    assert [told(wrapper) for wrapper in wrappers] == [[], []]
    vit.head = nn.Linear(32, 4)
    for wrapper in wrappers:
        (found,) = told(wrapper)
        assert found.startswith("error: wrapper: head.weight: this and 1 other were not there")


@pytest.mark.usefixtures("group")
def test_parameters_that_ddp_was_told_to_ignore_are_left_alone(vit) -> None:
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(vit, ["head.bias"])
    wrapper = DistributedDataParallel(vit)
    assert told(wrapper) == []
    zoo.freeze(vit, "head.bias")
    assert told(wrapper) == []


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("trained", [False, True])
def test_sparse_and_tied_parameters_raise_no_alarm_and_a_new_one_beside_them_does(trained) -> None:
    model = nn.ModuleDict({"table": nn.Embedding(4, 3, sparse=True), "a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    model.forward = lambda index: model["b"](model["a"](model["table"](index)))
    wrapper = DistributedDataParallel(model)
    if trained:
        wrapper(torch.tensor([1, 2])).sum().backward()
    assert [line for line in told(wrapper) if "wrapper" in line] == []
    model["b"].bias = nn.Parameter(torch.zeros(3))
    (found,) = [line for line in told(wrapper) if "wrapper" in line]
    assert found.startswith("error: wrapper: b.bias: this was not there when the model was wrapped")


def wrap_and_swap(accelerator: Accelerator) -> dict[str, Any]:
    """Return what the audit says of a prepared model as it is, and after a change under its wrapper."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    wrapper = accelerator.prepare(layers)
    fresh = told(wrapper)
    layers[1] = nn.Linear(4, 4)
    return {"class": type(wrapper).__name__, "fresh": fresh, "changed": told(wrapper)}


@pytest.mark.slow
def test_stale_wrapper_is_named_on_each_of_two_ranks(run_ranks) -> None:
    for outcome in run_ranks(wrap_and_swap):
        assert not outcome.error, outcome.traceback
        assert outcome.value["class"] == "DistributedDataParallel"
        assert outcome.value["fresh"] == []
        (found,) = outcome.value["changed"]
        assert found.startswith("error: wrapper: 1.weight: this and 1 other were not there when")
