"""Which images the next batch takes from which request."""

import asyncio
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Job:
    """The images of one request, and its answer while it is put together.

    Attributes:
        images: Preprocessed, (B, 3, height, width).
        done: Its answer, (B, K), on the event loop.
        deadline: When it is of no use any more, by `time.monotonic()`.
        entered: When it was queued.
        taken: When its last image was taken into a batch.
        left: Images that no batch has taken yet.
    """

    __slots__ = ("_rows", "_to_come", "deadline", "done", "entered", "images", "left", "taken")

    def __init__(
        self, images: NDArray[np.float32], done: asyncio.Future[NDArray[np.float32]], deadline: float, entered: float
    ) -> None:
        self.images, self.done, self.deadline, self.entered = images, done, deadline, entered
        self.taken = entered
        self.left = self._to_come = len(images)
        self._rows: NDArray[np.float32] | None = None

    def add(self, rows: NDArray[np.float32], start: int, stop: int) -> bool:
        """Add the answers of `images[start:stop]`; True if that was the last that was missing."""
        self._to_come -= stop - start
        if self._rows is None:
            if not self._to_come:  # whole in one batch, the common case
                self.done.set_result(rows)
                return True
            self._rows = np.empty((len(self.images), rows.shape[1]), rows.dtype)
        self._rows[start:stop] = rows
        if not self._to_come:
            self.done.set_result(self._rows)
        return not self._to_come


class Share(NamedTuple):
    """What one batch takes of one job: `images[start:stop]`."""

    job: Job
    start: int
    stop: int


def share_out(waiting: Iterable[Job], room: int, odd: int) -> list[Share]:
    """Share out a batch so that neither a big request starves small ones nor they it.

    Half of the room is for the request that came first, the other half for one image of each that came after it, in
    order; what is left is filled in order. So a request of many images gets at least half of the engine until it is
    done, and a small one behind it at least the other half. Requests of one image are simply first come, first served.

    Args:
        waiting: Jobs with images left, in order of arrival; they stay as they are.
        room: Most images of the batch.
        odd: 0 and 1 in turn, so that over two batches half is half of an odd number too.

    Returns:
        What to take, in order of arrival; empty if nobody waits.
    """
    counts: dict[Job, int] = {}
    free = room
    for job in waiting:
        if not free:
            break
        wanted = 1 if counts else min(job.left, (room + odd) // 2)
        counts[job] = wanted
        free -= wanted
    for job, count in counts.items():
        more = min(job.left - count, free)
        counts[job] = count + more
        free -= more
    shares = []
    for job, count in counts.items():
        start = len(job.images) - job.left
        if count:
            shares.append(Share(job, start, start + count))
    return shares
