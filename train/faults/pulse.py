"""Where this process is, and since when: marked by the work, read by the watch.

One record for the process, as with logging: what marks is deep inside the work, and a mark costs a microsecond. All
ranks pass the same marks in the same order, so the rank with the fewest is the one that the others wait for.
"""

import threading
import time
from dataclasses import dataclass, replace

_SUSPENDED_S = 10.0  # the watch reads the clock more often than that


@dataclass(frozen=True)
class Pulse:
    """How far a process has come.

    Attributes:
        count: Marks passed since the start; equal on all ranks that are at the same place.
        place: The work that the last mark began, in a few words.
        since: When it last got on, on the clock of `now`.
        patient: Whether this place may take as long as it likes.
    """

    count: int
    place: str
    since: float
    patient: bool


class Clock:
    """Seconds in which this process could run.

    Those in which it was suspended, as by Ctrl-Z or a paused container, do not count: nobody was late then. They are
    known by a gap between two readings.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last, self._lost = time.monotonic(), 0.0

    def read(self) -> float:
        """Return the time in seconds; from any thread."""
        with self._lock:
            time_s = time.monotonic()
            gap = time_s - self._last
            self._last = time_s
            if gap > _SUSPENDED_S:
                self._lost += gap
            return time_s - self._lost


_clock = Clock()
_now = Pulse(0, "starting", _clock.read(), patient=True)


def now() -> float:
    """Return the time in seconds that all of this process's watching goes by."""
    return _clock.read()


def mark(place: str, *, patient: bool = False) -> None:
    """Say that work begins that all ranks begin.

    Args:
        place: The work, as "step 7: forward".
        patient: Whether it may take as long as it likes, as publishing on the main process does.
    """
    global _now
    _now = Pulse(_now.count + 1, place, now(), patient)


def touch() -> None:
    """Say that the work under way gets on: for each image or batch of a long one, on one rank or on many."""
    global _now
    _now = replace(_now, since=now())


def read() -> Pulse:
    """Return where this process is; from any thread."""
    return _now
