import random

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from torch import nn

from tests.train.tiny import build_tiny, same, swapped, tiny_config, weights, write_images
from train import build
from train.buckets import settle_buckets
from train.build import wrap
from train.run import Run
from train.saving.checkpoint import Resume, read_state
from train.saving.resume import restore, restore_random, save_checkpoint
from train.step import train_step

DROPOUT = {"model__timm_kwargs": {"drop_rate": 0.3, "proj_drop_rate": 0.3}}


def test_one_rank_has_no_buckets(tiny):
    run = build_tiny(tiny())
    run.model = None
    settle_buckets(run)


def go(run: Run, count: int) -> Run:
    for _, batches in zip(range(count), run.batches(), strict=False):
        train_step(run, batches)
    return run


def resumed_is_straight(accelerator, root: str) -> dict[str, bool]:
    """Say whether a run that stops after three steps of six ends with the bits of one that does not; both ways."""
    same_bits = {}
    for name, settle in (("settled", settle_buckets), ("as DDP has them", lambda _run: None)):
        config = tiny_config(root, **DROPOUT, schedule__epochs=3, output_dir=f"{root}/../{name}")
        with swapped(build, "settle_buckets", settle):
            straight = weights(go(build_tiny(config), 6))
            run = go(build_tiny(config), 3)
            save_checkpoint(run)
            found = Resume(run.saved, read_state(run.saved))
            again = build_tiny(config, wrapped=False)
            restore(again, found)
            wrap(again)
            restore_random(again, found)
            same_bits[name] = same(weights(go(again, 3)), straight)
    assert accelerator.num_processes == 3
    return same_bits


class Watched(nn.BatchNorm1d):
    """A norm with running statistics that draws from all random streams, and notes how it was called."""

    def __init__(self) -> None:
        super().__init__(3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)
        self.seen: list[str] = []

    def forward(self, x):
        self.calls += 1
        self.seen.append(f"{tuple(x.shape)} train={self.training} {torch.get_autocast_dtype('cpu')}")
        random.random(), np.random.rand(), torch.rand(1)
        return super().forward(x.flatten(2)).view_as(x)


def leaves_all_as_it_was(accelerator, root: str) -> dict[str, object]:
    """Wrap a run in another precision and see what the discarded backward has changed."""
    AcceleratorState._reset_state()  # the group of ranks stays
    run = build_tiny(tiny_config(root, loop__mixed_precision="bf16", loop__batch_size_per_rank=2), wrapped=False)
    norm = Watched()
    run.bare.patch_embed = nn.Sequential(norm, run.bare.patch_embed)
    run.optimizer = torch.optim.AdamW(run.bare.parameters())
    before = {name: tensor.detach().clone() for name, tensor in (*run.bare.state_dict().items(), ("calls", norm.calls))}
    run.model, run.optimizer = run.accelerator.prepare(run.bare, run.optimizer)
    streams = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    settle_buckets(run)
    after = {name: tensor.detach().clone() for name, tensor in (*run.bare.state_dict().items(), ("calls", norm.calls))}
    return {
        "seen": norm.seen,
        "weights and buffers": same(before, after),
        "gradients": [name for name, parameter in run.bare.named_parameters() if parameter.grad is not None],
        "optimizer": len(run.optimizer.state),
        "python": random.getstate() == streams[0],
        "numpy": np.random.get_state()[1].tolist() == streams[1],
        "torch": torch.equal(torch.get_rng_state(), streams[2]),
        "ranks": accelerator.num_processes,
    }


def both(accelerator, root: str) -> list[dict[str, object]]:
    return [resumed_is_straight(accelerator, root), leaves_all_as_it_was(accelerator, root)]


@pytest.fixture(scope="module")
def on_three_ranks(run_ranks, tmp_path_factory):
    outcomes = run_ranks(both, world_size=3, root=str(write_images(tmp_path_factory.mktemp("buckets") / "images")))
    for outcome in outcomes:
        assert not outcome.error, outcome.traceback
    return [outcome.value for outcome in outcomes]


@pytest.mark.slow
def test_three_ranks_resume_bit_for_bit_with_settled_buckets_and_not_without(on_three_ranks):
    for same_bits, _ in on_three_ranks:
        assert same_bits == {"settled": True, "as DDP has them": False}


@pytest.mark.slow
def test_discarded_backward_has_the_steps_shape_and_precision_and_leaves_all_as_it_was(on_three_ranks):
    for _, left in on_three_ranks:
        assert left == {
            "seen": ["(2, 3, 8, 8) train=True torch.bfloat16"],
            "weights and buffers": True,
            "gradients": [],
            "optimizer": 0,
            "python": True,
            "numpy": True,
            "torch": True,
            "ranks": 3,
        }
