"""The fixture that other tests stand on: a rank that dies or hangs fails the test, and takes no other rank with it."""

import os
import time

import pytest
from accelerate import Accelerator


def die_on_rank_1(accelerator: Accelerator) -> None:
    if accelerator.process_index == 1:
        os._exit(7)
    accelerator.wait_for_everyone()
    time.sleep(60)


def raise_on_rank_1(accelerator: Accelerator, *, message: str) -> int:
    if accelerator.process_index == 1:
        raise ValueError(message)
    return accelerator.num_processes


@pytest.mark.slow
def test_dead_rank_fails_the_test_at_once(run_ranks) -> None:
    with pytest.raises(pytest.fail.Exception, match="die_on_rank_1: a rank left no outcome"):
        run_ranks(die_on_rank_1, timeout_s=50)


@pytest.mark.slow
def test_each_rank_has_its_own_outcome(run_ranks) -> None:
    first, second = run_ranks(raise_on_rank_1, message="no such folder")
    assert (first.rank, first.value, first.error) == (0, 2, "")
    assert (second.rank, second.error, second.message) == (1, "ValueError", "no such folder")
