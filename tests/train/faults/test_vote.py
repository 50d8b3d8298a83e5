import pytest
from accelerate import Accelerator

from train.faults import stop
from train.faults.vote import StopVote


def leave(accelerator: Accelerator, asked_at: dict[str, int]) -> dict[str, object]:
    """Take steps until all leave; a rank is asked to before the vote of its step."""
    mine, vote = asked_at.get(str(accelerator.process_index)), StopVote(accelerator)
    for step in range(1, 20):
        if step == mine:
            stop.request(f"SIGTERM on rank {accelerator.process_index}")
        assert not stop.granted()
        if vote.cast():
            return {"left": step, "granted": stop.granted(), "asked": stop.requested()}
    return {"left": None, "granted": stop.granted()}


def leave_again_and_again(accelerator: Accelerator) -> list[dict[str, object]]:
    """On three ranks: one is asked, two are at once, two after one another, and none."""
    told = []
    for asked_at in ({"1": 3}, {"0": 1, "2": 1}, {"0": 7, "1": 5}, {}):
        with stop.listening():
            told.append(leave(accelerator, asked_at))
    return told


def test_alone_it_leaves_after_the_step_in_which_it_was_asked():
    with stop.listening():
        vote = StopVote(Accelerator(cpu=True))
        assert not vote.cast()
        assert not stop.granted()
        stop.request("SIGTERM")
        assert vote.cast()
        assert stop.granted()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked_at", "left"), [({"1": 3}, 4), ({"0": 1, "2": 1}, 2), ({"0": 7, "1": 5}, 6), ({}, None)]
)
def test_all_ranks_leave_after_the_same_step(run_ranks, asked_at, left):
    outcomes = run_ranks(leave, world_size=3, asked_at=asked_at)
    assert [outcome.error for outcome in outcomes] == [""] * 3, outcomes[0].traceback
    assert [outcome.value["left"] for outcome in outcomes] == [left] * 3
    if left is not None:
        assert all(outcome.value["granted"] for outcome in outcomes)
