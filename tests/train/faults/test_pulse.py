from types import SimpleNamespace

import pytest

from train.faults import pulse


@pytest.fixture
def clock(monkeypatch):
    """`clock.time` is the machine's; the process starts at 100 s."""
    clock = SimpleNamespace(time=100.0)
    monkeypatch.setattr(pulse, "time", SimpleNamespace(monotonic=lambda: clock.time))
    monkeypatch.setattr(pulse, "_clock", pulse.Clock())
    return clock


def test_mark_counts_and_names_the_place(clock):
    before = pulse.read()
    clock.time += 2
    pulse.mark("step 3: forward")
    now = pulse.read()
    assert (now.count, now.place, now.since, now.patient) == (before.count + 1, "step 3: forward", 102.0, False)
    pulse.mark("publishing", patient=True)
    assert (pulse.read().count, pulse.read().patient) == (before.count + 2, True)


def test_touch_gets_on_at_the_same_place(clock):
    pulse.mark("evaluating")
    before = pulse.read()
    clock.time += 5
    pulse.touch()
    now = pulse.read()
    assert (now.count, now.place, now.since) == (before.count, "evaluating", 105.0)


def test_time_in_which_the_process_was_suspended_does_not_count(clock):
    pulse.mark("step 3: forward")
    clock.time += 1
    assert pulse.now() - pulse.read().since == 1
    clock.time += 3600
    assert pulse.now() - pulse.read().since == 1
    clock.time += 1
    assert pulse.now() - pulse.read().since == 2


def test_time_that_the_watch_sees_pass_counts_however_long(clock):
    pulse.mark("step 3: forward")
    for _ in range(100):
        clock.time += 8  # a look of the watch in a very large world
        pulse.now()
    assert pulse.now() - pulse.read().since == 800
