"""Where this process is, and since when: marked by the work, read by the watch.

One record for the process, as with logging: what marks is deep inside the work, and a mark costs a microsecond. All
ranks pass the same marks in the same order, so the rank with the fewest is the one that the others wait for.
"""

import time
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Pulse:
    """How far a process has come.

    Attributes:
        count: Marks passed since the start; equal on all ranks that are at the same place.
        place: The work that the last mark began, in a few words.
        since: When it last got on, on the clock of `time.monotonic`.
        patient: Whether this place may take as long as it likes.
    """

    count: int
    place: str
    since: float
    patient: bool


_now = Pulse(0, "starting", time.monotonic(), patient=True)


def mark(place: str, *, patient: bool = False) -> None:
    """Say that work begins that all ranks begin.

    Args:
        place: The work, as "step 7: forward".
        patient: Whether it may take as long as it likes, as publishing on the main process does.
    """
    global _now
    _now = Pulse(_now.count + 1, place, time.monotonic(), patient)


def touch() -> None:
    """Say that the work under way gets on: for each image or batch of a long one, on one rank or on many."""
    global _now
    _now = replace(_now, since=time.monotonic())


def read() -> Pulse:
    """Return where this process is; from any thread."""
    return _now
