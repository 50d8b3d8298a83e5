import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from accelerate import Accelerator

from tests.train.faults.boards import board_kept_by_another, boards_of, start_all
from tests.train.tiny import swapped
from train.faults import board as board_module
from train.faults import pulse
from train.faults.board import open_board
from train.faults.cause import Cause


def gone(rank: int) -> Cause:
    return Cause(kind="gone", ranks=(rank,), message=f"rank {rank} is gone")


def test_each_rank_reads_all_signs_of_life():
    with boards_of(3) as boards:
        start_all(boards)
        for board in boards:
            board.wait_until(lambda reading: len(reading.beats) == 3 and all(reading.beats), 10)
            assert [beat["place"] for beat in board.read().beats] == ["rank 0", "rank 1", "rank 2"]
            assert board.read().cause is None
            assert not board.read().told


def test_rank_that_has_not_come_yet_has_left_no_sign():
    with boards_of(2) as boards:
        start_all(boards[:1])
        boards[0].wait_until(lambda reading: bool(reading.beats), 10)
        assert boards[0].read().beats == ({"place": "rank 0", "told": False}, {})


def test_of_causes_that_are_claimed_at_once_all_ranks_get_the_same():
    for _ in range(2):
        with boards_of(4) as boards, ThreadPoolExecutor(4) as pool:
            start_all(boards)
            causes = list(pool.map(lambda board: board.claim(gone(board._rank)), boards))
            assert len({cause.message for cause in causes}) == 1
            for board in boards:
                board.wait_until(lambda reading: reading.cause is not None, 10)
                assert board.read().cause == causes[0]


def test_later_cause_does_not_replace_the_first():
    with boards_of(2) as boards:
        start_all(boards)
        assert boards[1].claim(gone(0)) == gone(0)
        assert boards[0].claim(gone(1)) == gone(0)


def test_who_tells_knows_that_the_others_have_read_it(monkeypatch):
    monkeypatch.setattr(board_module, "_CLAIM_S", 10.0)
    with boards_of(2) as boards:
        start_all(boards)
        boards[0].set_told((0, 1))
        assert [beat["told"] for beat in boards[0].read().beats] == [True, True]
        assert boards[1].read().told
        boards[1].confirm_told()


def test_waiting_ends_in_time(monkeypatch):
    monkeypatch.setattr(board_module, "_CLAIM_S", 0.05)
    with boards_of(2) as boards:  # nobody asks, as if the connection hung
        assert boards[1].claim(gone(0)) == gone(0)
        boards[1].set_told((0, 1))
        boards[1].confirm_told()
        boards[1].wait_until(lambda reading: reading.told, 0.05)
        assert not boards[1].read().told


@pytest.mark.slow
def test_board_of_a_killed_rank_0_is_broken_and_each_rank_keeps_its_own_cause():
    with board_kept_by_another(2) as (keeper, board):
        assert not board.read().broken
        keeper.kill()
        board.wait_until(lambda reading: reading.broken, 10)
        assert board.read().broken
        assert board.read().beats[0]["place"] == "kept", "what it said last stays known"
        assert board.claim(gone(0)) == gone(0)


@pytest.mark.slow
def test_board_of_a_stopped_rank_0_gets_old_and_nobody_blocks_on_it(monkeypatch):
    monkeypatch.setattr(board_module, "_CLAIM_S", 0.2)
    with board_kept_by_another(2) as (keeper, board):
        keeper.send_signal(signal.SIGSTOP)
        time.sleep(0.3)  # what was under way has come back
        stopped = board.read().at
        assert board.claim(gone(0)) == gone(0)
        assert board.read().at == stopped
        assert not board.read().broken
        keeper.send_signal(signal.SIGCONT)
        board.wait_until(lambda reading: reading.cause is not None, 10)
        assert board.read().cause == gone(0)
        assert board.read().at > stopped


def test_alone_there_is_no_board():
    assert open_board(Accelerator(cpu=True)) is None


def meet(accelerator: Accelerator) -> dict[str, object]:
    """Open the board on real ranks; then again where rank 1 has no way to rank 0."""
    rank = accelerator.process_index
    board = open_board(accelerator)
    board.start(lambda: {"place": f"rank {rank}", "at": pulse.read().place}, 0.05)
    board.wait_until(lambda reading: len(reading.beats) == 2 and all(reading.beats), 20)
    said: dict[str, object] = {"places": [beat["place"] for beat in board.read().beats]}
    if rank == 1:
        os.environ["MASTER_ADDR"] = "127.1.2.3.4"
    try:
        with swapped(board_module, "_CONNECT", board_module.timedelta(seconds=1)):
            open_board(accelerator)
    except Exception as error:
        said["lost"] = f"{type(error).__name__}: {error}"
    accelerator.wait_for_everyone()
    return said


@pytest.mark.slow
def test_ranks_meet_at_rank_0s_board_or_all_hear_who_cannot(run_ranks):
    for outcome in run_ranks(meet):
        assert not outcome.error, outcome.traceback
        assert outcome.value["places"] == ["rank 0", "rank 1"]
        assert outcome.value["lost"].startswith("WorldSizeError: rank 1 cannot reach rank 0 at 127.1.2.3.4:")
        assert "ranks need all ports between the machines" in outcome.value["lost"]
