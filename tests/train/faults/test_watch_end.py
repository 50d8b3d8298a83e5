"""How the watch settles on a cause, and who tells it."""

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.train.faults.boards import Closed, boards_of
from tests.train.faults.watches import make_watch, until
from train.config import WatchConfig
from train.errors import ConfigError
from train.faults.board import Board
from train.faults.cause import Cause
from train.faults.watch import speaker_of

BROKEN_OFF = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711")
RUN = """
import os, time
from train.config import WatchConfig
from train.faults import pulse, watch
from train.faults.peers import Peer, find_system

class Words:
    def speak(self, cause):
        print("told", cause.kind, flush=True)
        {speak}

watch._LAST_S = 1.0
one = watch.Watch([Peer(0, "here", find_system(), os.getpid())], 0, WatchConfig(timeout_s=0.2), None, Words())
pulse.mark("step 3: forward")
one.start()
time.sleep(60)
"""
pytestmark = pytest.mark.usefixtures("exits")


@pytest.mark.parametrize(("mute", "speaker"), [((), 0), ((0,), 1), ((0, 1), 2), ((1,), 0), ((0, 1, 2), 0)])
def test_the_lowest_rank_that_can_speaks(mute, speaker):
    assert speaker_of(mute, 3) == speaker


def test_alone_an_error_is_its_own_cause_and_told_here():
    watch = make_watch()
    watch.start()
    cause, mine = watch.settle(ConfigError("steps is 0"))
    watch.finish(cause)
    watch.close()
    assert mine
    assert (cause.kind, cause.message, cause.status) == ("raised", "steps is 0", 2)
    assert watch.words.told == [cause]


def test_error_of_one_rank_ends_the_other_and_rank_0_tells_it(two, exits):
    first, second = two
    cause, mine = second.settle(ValueError("boom"))
    assert mine
    second.finish(cause)
    until(lambda: exits)
    assert first.words.told == [cause]
    assert second.words.told == []
    assert cause.message == "rank 1, step 3: forward: ValueError: boom"


def test_collective_that_broke_off_is_not_the_cause(two):
    first, second = two
    gone = Cause(kind="gone", ranks=(1,), message="rank 1 is gone")
    threading.Timer(0.2, second._board.claim, (gone,)).start()
    assert first.settle(BROKEN_OFF) == (gone, False)
    first.finish(gone)
    assert first.words.told == [gone]


def test_collective_that_broke_off_for_no_known_reason_is_told_after_a_wait():
    watch = make_watch(config=WatchConfig(silence_s=1e-3))
    watch._found.set()
    cause, mine = watch.settle(BROKEN_OFF)
    assert mine
    assert "Connection closed by peer" in cause.message


def test_of_two_errors_at_once_one_is_the_cause_on_both(two):
    settled: dict[int, tuple[Cause, bool]] = {}

    def settle(rank: int) -> None:
        settled[rank] = two[rank].settle(ValueError(f"boom {rank}"))

    threads = [threading.Thread(target=settle, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert settled[0][0] == settled[1][0]
    assert sorted(mine for _, mine in settled.values()) == [False, True]


def test_rank_whose_turn_it_is_speaks_where_the_first_does_not(two):
    first, second = two
    first._done.set()
    first._thread.join()  # it has hung up in its last words
    cause = Cause(kind="raised", ranks=(1,), message="boom")
    second.finish(cause)
    assert second.words.told == [cause]
    assert second._board.read().told


def test_rank_0_that_has_told_and_left_is_not_repeated(two):
    first, second = two
    cause = Cause(kind="raised", ranks=(0,), message="boom")
    first.finish(cause)
    second._board._reading = replace(second._board.read(), broken=True)
    second.finish(cause)
    assert (first.words.told, second.words.told) == ([cause], [])


@pytest.mark.parametrize(
    ("kind", "gone", "broken", "speaker"),
    [
        ("gone", (0,), True, 1),
        ("gone", (0,), False, 1),
        ("raised", (1,), True, 1),  # and rank 0 is gone as well
        ("silent", (0, 1), True, 2),
        ("gone", (1,), False, 0),
        ("stopped", (1,), False, 0),
    ],
)
def test_one_rank_of_three_tells_whoever_is_gone(monkeypatch, kind, gone, broken, speaker):
    def hear(board: Board, *_: object) -> None:
        board._reading = replace(board.read(), told=True)

    cause = Cause(kind=kind, ranks=gone, message="boom")
    with boards_of(3) as boards, monkeypatch.context() as patched:
        patched.setattr(Board, "wait_until", hear)
        for board in boards:
            board._reading = replace(board.read(), broken=broken)
        alive = [rank for rank in range(3) if rank not in cause.gone and not (broken and rank == 0)]
        assert [rank for rank in alive if make_watch(rank, boards)._is_mine_to_tell(cause, boards[rank])] == [speaker]


def test_speaker_that_dies_while_it_tells_is_followed_by_the_next(two):
    first, second = two
    first._done.set()
    threading.Timer(0.1, lambda: setattr(second._board, "_store", Closed())).start()
    cause = Cause(kind="raised", ranks=(1,), message="boom")
    second.finish(cause)
    assert second._board.read().broken
    assert second.words.told == [cause]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("speak", "said"),
    [
        ("", ""),
        ("raise OSError(5, 'the terminal is closed')", "OSError: [Errno 5] the terminal is closed"),
        ("time.sleep(60)", ""),
    ],
    ids=["told", "cannot tell", "hangs while it tells"],
)
def test_process_ends_whatever_comes_of_its_last_words(speak, said):
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    code = RUN.replace("{speak}", speak)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=45, check=False
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout == "told hung\n"
    assert said in done.stderr
    assert bool(done.stderr) == bool(said)
