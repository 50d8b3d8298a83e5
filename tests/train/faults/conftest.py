"""Fixtures of the watch's tests."""

from collections.abc import Iterator

import pytest

from tests.train.faults.boards import boards_of
from tests.train.faults.watches import make_watch
from train.faults import pulse
from train.faults import watch as watch_module
from train.faults.cause import Cause
from train.faults.watch import Watch


@pytest.fixture
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
