import logging
import os
import signal
import threading
import time

import pytest

from tests.train.faults.watches import Words, make_watch, until
from train.config import WatchConfig
from train.errors import Stopped
from train.faults import pulse, stop
from train.faults.cause import Cause
from train.faults.peers import Peer
from train.faults.watch import Watch

pytestmark = pytest.mark.usefixtures("exits")


def test_alone_it_ends_where_it_hangs(exits):
    watch = make_watch(config=WatchConfig(timeout_s=0.3))
    watch.start()
    until(lambda: exits)
    (cause,) = watch.words.told
    assert cause.kind == "hung"
    assert "all are at step 3: forward: rank 0 in " in cause.message
    watch.close()


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
    assert period(20_000) == 5


@pytest.mark.parametrize(("given", "expected"), [(None, 0.2), ("60", 30.2), ("3", 0.05)])
def test_stop_comes_before_the_launchers_own_patience_ends(monkeypatch, given, expected):
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    if given is not None:
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", given)
    assert make_watch()._stop_s == pytest.approx(expected)
