import os
import signal
from types import SimpleNamespace

import pytest

from train.errors import Stopped
from train.faults import stop

SIGNALS = {signal.SIGTERM: "SIGTERM", signal.SIGINT: r"Ctrl-C \(SIGINT\)", signal.SIGHUP: r"a closed .* \(SIGHUP\)"}


def send(number: int) -> None:
    """Send a signal to this process; it has been handled when this returns."""
    os.kill(os.getpid(), number)
    for _ in range(3):
        pass


@pytest.fixture(autouse=True)
def _defaults():
    """A shell lets what it starts in the background ignore Ctrl-C, and nohup a closed terminal: not here."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(time=100.0)
    monkeypatch.setattr(stop, "time", SimpleNamespace(monotonic=lambda: clock.time))
    return clock


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_stops_at_once_where_no_steps_are_taken(number):
    with stop.listening(), pytest.raises(Stopped, match=f"^{SIGNALS[number]}$"):
        send(number)


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_waits_for_the_end_of_a_step(number):
    def step() -> None:
        assert stop.requested() is None
        send(number)
        raise Stopped(f"{stop.requested()} after step 1", agreed=True)

    with stop.listening(), pytest.raises(Stopped, match=f"^{SIGNALS[number]} after step 1$"), stop.graceful():
        step()


def test_stop_that_no_step_was_left_to_agree_on_comes_after_the_last():
    with stop.listening(), pytest.raises(Stopped, match=r"^SIGTERM$"), stop.graceful():
        send(signal.SIGTERM)


def test_error_of_the_last_step_comes_before_the_stop():
    def step() -> None:
        send(signal.SIGTERM)
        raise ValueError("planned")

    with stop.listening(), pytest.raises(ValueError, match="planned"), stop.graceful():
        step()


def test_second_signal_does_not_wait_but_its_echo_does(clock):
    def step() -> None:
        send(signal.SIGINT)
        clock.time += 1
        send(signal.SIGTERM)  # a launcher passes on what the terminal has sent already
        assert stop.requested() == "Ctrl-C (SIGINT)"
        clock.time += 3
        send(signal.SIGINT)
        pytest.fail("waits")

    with stop.listening(), pytest.raises(Stopped, match=r"^Ctrl-C \(SIGINT\), twice$"), stop.graceful():
        step()


def test_signal_that_the_watch_has_seen_long_before_the_main_thread_could_is_no_second_one(clock):
    def step() -> None:
        stop.request("SIGTERM")  # by the watch, while the main thread is inside a backward
        clock.time += 15
        send(signal.SIGTERM)
        assert stop.requested() == "SIGTERM"

    with stop.listening(), pytest.raises(Stopped, match=r"^SIGTERM$"), stop.graceful():
        step()


def test_launcher_that_is_gone_asks_and_the_first_reason_stays():
    with stop.listening():
        stop.request("the launcher is gone")
        stop.request("SIGTERM")
        assert stop.requested() == "the launcher is gone"
    assert stop.requested() is None


def test_what_the_user_ignores_stays_ignored_as_by_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop.listening():
            send(signal.SIGHUP)
            assert stop.requested() is None
            assert stop.unheard() is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_handlers_are_as_before_afterwards():
    def fail() -> None:
        stop.ignore()
        raise ValueError("planned")

    before = {number: signal.getsignal(number) for number in SIGNALS}
    with pytest.raises(ValueError, match="planned"), stop.listening():
        fail()
    assert {number: signal.getsignal(number) for number in SIGNALS} == before
    assert stop.unheard() is None
    assert not stop.granted()


def test_nothing_disturbs_the_last_words():
    with stop.listening():
        stop.ignore()
        for number in SIGNALS:
            send(number)
        assert stop.requested() is None


def test_signals_that_nobody_listens_to_are_left_alone():
    before = signal.getsignal(signal.SIGTERM)
    stop.ignore()
    assert signal.getsignal(signal.SIGTERM) is before


def test_signal_is_seen_beside_the_main_thread_once():
    def step() -> None:
        assert stop.unheard() is None
        send(signal.SIGTERM)
        assert stop.unheard() == "SIGTERM"
        assert stop.unheard() is None

    with stop.listening(), pytest.raises(Stopped), stop.graceful():
        step()
