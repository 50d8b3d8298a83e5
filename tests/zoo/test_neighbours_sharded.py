"""A swapped model under torch's own sharding (FSDP2) and DDP, on two real ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.zoo.families import VARIANTS, as_stock, build_images, build_pair, build_stock
from zoo.errors import ZooError

RunRanks = Callable[..., Any]


def shard(accelerator: Accelerator, family: str, variant: str) -> dict[str, Any]:  # noqa: ARG001
    """Compare a sharded swapped model to the stock one, and say what a write to a joined weight meets."""
    ours, stock = build_pair(family, variant)
    for block in ours.blocks:  # type: ignore[union-attr]
        fully_shard(block)
    fully_shard(ours)
    images = build_images(family)
    got, wanted = ours(images), stock(images)
    for logits in (got, wanted):
        logits.square().sum().backward()
    ours_grad = as_stock(ours, lambda p: None if p.grad is None else p.grad.full_tensor())  # type: ignore[attr-defined]
    wanted_grad = as_stock(stock, lambda parameter: parameter.grad)
    found = {
        "logits": torch.equal(got, wanted),
        "wrong": [name for name, grad in wanted_grad.items() if not torch.equal(ours_grad[name], grad)],
        "shards": ours.get_parameter("head.weight").to_local().shape[0] < 3,  # type: ignore[attr-defined]
        "refusal": "",
    }
    try:
        ours.init_weights()  # type: ignore[operator]
    except ZooError as error:
        found["refusal"] = str(error)
    return found


def wrap(accelerator: Accelerator, family: str, variant: str) -> list[str]:  # noqa: ARG001
    """Load stock weights through DDP's prefix, and return the names of gradients that differ from the stock model's."""
    ours, stock = build_pair(family, variant)
    wrapped = DistributedDataParallel(ours)
    other = build_stock(family, noise=0.05)
    wrapped.load_state_dict({f"module.{name}": tensor for name, tensor in other.state_dict().items()}, strict=True)
    stock.load_state_dict(other.state_dict())
    for model in (wrapped, stock):
        model(build_images(family)).square().sum().backward()
    got, wanted = (as_stock(model, lambda parameter: parameter.grad) for model in (ours, stock))
    assert isinstance(ours, nn.Module)
    return [name for name, gradient in wanted.items() if not torch.equal(got[name], gradient)]


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", ["vit", "eva"])
def test_fully_shard_trains_the_stock_model_and_refuses_a_lost_write(
    run_ranks: RunRanks, family: str, variant: str
) -> None:
    for outcome in run_ranks(shard, family=family, variant=variant):
        assert not outcome.error, outcome.traceback
        assert outcome.value["logits"]
        assert outcome.value["wrong"] == []
        assert outcome.value["shards"]
        assert outcome.value["refusal"].startswith("a weight that is joined from sharded parts cannot be written to")


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_ddp_loads_stock_names_below_its_prefix_and_trains_alike(run_ranks: RunRanks, variant: str) -> None:
    for outcome in run_ranks(wrap, family="vit", variant=variant):
        assert not outcome.error, outcome.traceback
        assert outcome.value == []
