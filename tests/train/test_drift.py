import time

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from train.drift import DriftCheck


def build(accelerator: Accelerator) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2).requires_grad_(False))
    return bare, *accelerator.prepare(bare, torch.optim.AdamW(bare.parameters()))


def unfreeze_in_mid_run(accelerator: Accelerator) -> dict[str, object]:
    """Ask at each of 12 steps, every 5 of which are due; in between parameters are unfrozen, added, frozen."""
    bare, model, optimizer = build(accelerator)
    drift = DriftCheck(model, accelerator, optimizer, every_steps=5, last_step=12)
    due = []
    for step in range(1, 13):
        if step == 3:
            bare[1].requires_grad_(True)
        if step == 7:
            bare[1].gamma = nn.Parameter(torch.ones(2))
        if step == 8:
            bare[1].add_module("late", nn.Linear(2, 2))
        if drift.after_step(step) is not None:
            due.append(step)
    return {"due": due, "checks": drift.checks, "seconds": drift.seconds}


def unfreeze_on_rank_1(accelerator: Accelerator) -> str:
    bare, model, optimizer = build(accelerator)
    drift = DriftCheck(model, accelerator, optimizer, every_steps=2, patience_s=0.5)
    drift.after_step(1)
    if accelerator.process_index == 1:
        bare[1].requires_grad_(True)
        drift.after_step(2)
    time.sleep(1)  # its next step, which waits for rank 1
    return "went on"


@pytest.mark.slow
def test_due_at_the_interval_the_first_the_last_and_around_each_change(run_ranks) -> None:
    for outcome in run_ranks(unfreeze_in_mid_run):
        assert not outcome.error, outcome.traceback
        assert outcome.value["due"] == [1, 3, 4, 5, 7, 8, 9, 10, 12]
        assert outcome.value["checks"] == 9
        assert outcome.value["seconds"] > 0


@pytest.mark.slow
def test_rank_that_alone_unfreezes_raises_and_does_not_wait_in_a_collective(run_ranks) -> None:
    first, second = run_ranks(unfreeze_on_rank_1)
    assert first.value == "went on"
    assert second.error == "RanksDisagree"
    assert second.message == (
        "rank 1: trainable parameters changed before the end of step 2, but not on rank 0 in 0.5 s: freeze and "
        "unfreeze after the same step on all ranks"
    )


def test_world_of_one_checks_nothing() -> None:
    bare, model, optimizer = build(Accelerator(cpu=True))
    drift = DriftCheck(model, Accelerator(cpu=True), optimizer, every_steps=1)
    bare[1].requires_grad_(True)
    assert drift.after_step(1) is None
    assert (drift.checks, drift.seconds) == (0, 0.0)


def test_cost_is_told_as_a_share_of_the_training() -> None:
    drift = DriftCheck(nn.Linear(2, 2), Accelerator(cpu=True))
    drift.checks, drift.seconds = 7, 0.5
    assert drift.describe(200.0) == "replicas checked 7 times, 0.25% of training time"
    drift.checks = 1
    assert drift.describe(0.0).startswith("replicas checked once, ")
