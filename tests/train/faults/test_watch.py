import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.train.faults.boards import Closed, boards_of
from train.config import WatchConfig
from train.errors import ConfigError, Stopped
from train.faults import pulse, stop
from train.faults import watch as watch_module
from train.faults.board import Board
from train.faults.cause import Cause
from train.faults.peers import Peer, find_system
from train.faults.watch import Watch, speaker_of

BROKEN_OFF = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711")
PATIENT = WatchConfig(timeout_s=600, silence_s=20)
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


class Words:
    """Keeps what would be told."""

    def __init__(self) -> None:
        self.told: list[Cause] = []

    def speak(self, cause: Cause) -> None:
        self.told.append(cause)

    def echo(self, cause: Cause) -> None:
        """Nothing: there is one machine."""


@pytest.fixture(autouse=True)
def exits(monkeypatch) -> Iterator[list[int]]:
    """Statuses with which this process would have ended; looks are frequent, waits short."""
    statuses: list[int] = []

    def leave(watch: Watch, cause: Cause) -> None:
        watch.finish(cause)
        statuses.append(cause.status)
        watch._done.set()

    monkeypatch.setattr(Watch, "_leave", leave)
    for name, seconds in {"_PERIOD_S": 0.02, "_MAIN_FIRST_S": 0.1, "_TOLD_S": 0.5, "_STOP_S": 0.2}.items():
        monkeypatch.setattr(watch_module, name, seconds)
    pulse.mark("step 3: forward")
    yield statuses
    pulse.mark("between tests", patient=True)


def make_watch(
    rank: int = 0, boards: list[Board] | None = None, config: WatchConfig = PATIENT, parent: int | None = None
) -> Watch:
    """Make the watch of one rank of this process."""
    ranks = range(len(boards) if boards else 1)
    peers = [Peer(number, "here", find_system(), os.getpid()) for number in ranks]
    return Watch(peers, rank, config, boards[rank] if boards else None, Words(), parent)


@pytest.fixture
def two() -> Iterator[list[Watch]]:
    """The watches of two ranks, started."""
    with boards_of(2) as boards:
        watches = [make_watch(rank, boards) for rank in (0, 1)]
        for watch in watches:
            watch.start()
        for board in boards:
            board.wait_until(lambda reading: len(reading.beats) == 2 and all(reading.beats), 10)
        yield watches
        for watch in watches:
            watch._done.set()
            watch._thread.join()


def until(holds: Callable[[], object], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


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


def test_alone_it_ends_where_it_hangs(exits):
    watch = make_watch(config=WatchConfig(timeout_s=0.3))
    watch.start()
    until(lambda: exits)
    (cause,) = watch.words.told
    assert cause.kind == "hung"
    assert "all are at step 3: forward: rank 0 in " in cause.message
    watch.close()


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
    cause = Cause(kind=kind, ranks=gone, message="boom")
    with boards_of(3) as boards:
        for board in boards:
            board._reading = replace(board.read(), broken=broken)
            told = replace(board.read(), told=True)
            monkeypatch.setattr(
                board, "wait_until", lambda *_, board=board, told=told: setattr(board, "_reading", told)
            )
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


def test_ranks_that_say_goodbye_are_not_missed(two, exits):
    first, second = two
    closing = threading.Thread(target=second.close)
    closing.start()
    first.close()
    closing.join()
    assert [beat["left"] for beat in first._board.read().beats] == [True, True]
    assert exits == []


def test_fault_of_the_watch_itself_is_told_once_and_it_goes_on(monkeypatch, caplog, exits):
    watch = make_watch(config=WatchConfig(timeout_s=0.5))
    real, failed = watch._observer.judge, []

    def judge(now: float) -> Cause | None:
        if len(failed) < 3:
            failed.append(now)
            raise KeyError("planned")
        return real(now)

    monkeypatch.setattr(watch._observer, "judge", judge)
    with caplog.at_level(logging.ERROR):
        watch.start()
        until(lambda: exits)
    assert len(failed) == 3
    assert [record.getMessage() for record in caplog.records] == [
        "the watch could not look at the ranks, and tries again: KeyError: 'planned'"
    ]
    watch.close()


def test_launcher_that_is_gone_asks_for_a_stop():
    with stop.listening():
        watch = make_watch(parent=1 if os.getppid() != 1 else 2)
        watch.start()
        until(stop.requested)
        watch.close()
        assert stop.requested() == "the launcher is gone"


def signalled(watch: Watch, *, granted: bool = False) -> Cause | None:
    """Return what a watch says 0.3 s after a SIGTERM, on a rank that gets on."""

    def step() -> Cause | None:
        os.kill(os.getpid(), signal.SIGTERM)
        assert watch._look() is None
        if granted:
            stop.grant()
        time.sleep(0.3)
        pulse.mark("step 3: backward")
        return watch._look()

    said: list[Cause | None] = []
    with stop.listening(), pytest.raises(Stopped), stop.graceful():
        said.append(step())
    return said[0]


def test_stop_that_comes_too_late_for_the_launcher_is_not_waited_for():
    cause = signalled(make_watch(parent=os.getppid()))
    assert cause.kind == "stopped"
    assert cause.message == "SIGTERM, and no step ended in 0.2 s: nothing was saved after the last checkpoint"


def test_stop_that_is_under_way_is_waited_for():
    assert signalled(make_watch(parent=os.getppid()), granted=True) is None


def test_without_a_launcher_a_stop_may_come_late_as_long_as_the_work_gets_on():
    assert signalled(make_watch()) is None


def test_large_world_is_looked_at_more_seldom_but_often_enough_to_be_heard():
    def period(ranks: int) -> float:
        peers = [Peer(rank, "here", "elsewhere", 1) for rank in range(ranks)]
        return Watch(peers, 0, WatchConfig(silence_s=20), None, Words())._period

    assert period(2) == period(64) == pytest.approx(0.02)
    assert period(640) == pytest.approx(0.2)
    assert period(1_000_000) == 5


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
