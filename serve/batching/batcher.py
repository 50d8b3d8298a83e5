"""From requests to batches. Places are bounded; a request holds its places from before its images are decoded."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from serve.errors import DeadlineError, QueueFullError
from serve.operations.metrics import Metrics

Predict = Callable[[NDArray[np.float32]], NDArray[np.float32]]


@dataclass(frozen=True)
class BatchLimits:
    """How requests become batches.

    Attributes:
        max_batch: Most images in one batch.
        wait_s: Longest that a lone image waits for company while the engine is idle, in seconds.
        max_queue: Most images that hold a place, the ones being decoded and computed included.
    """

    max_batch: int = 8
    wait_s: float = 0.002
    max_queue: int = 128


class Place:
    """What a request holds in the queue: room for its images. Leaving the block gives it back, however it is left."""

    def __init__(self, batcher: "Batcher", count: int) -> None:
        self._batcher, self._count = batcher, count

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._batcher.held -= self._count

    async def run(self, images: NDArray[np.float32], deadline: float) -> NDArray[np.float32]:
        """Wait for the probabilities, (B, K), of preprocessed images, (B, 3, height, width).

        Args:
            images: No more of them than the place has room for.
            deadline: When to give up, on the clock of `asyncio.get_running_loop().time()`.

        Raises:
            DeadlineError: If it passes first; images not yet computed are dropped.
            RuntimeError: If the engine fails.
        """
        try:
            async with asyncio.timeout_at(deadline):
                return await asyncio.to_thread(self._batcher.predict, images)
        except TimeoutError as error:
            raise DeadlineError("no answer within the time that a request may take") from error


class Batcher:
    """The queue before one model, and the thread that computes."""

    def __init__(self, predict: Predict, limits: BatchLimits, metrics: Metrics) -> None:
        self.predict, self.limits, self.metrics = predict, limits, metrics
        self.held = 0

    def reserve(self, count: int) -> Place:
        """Take room for `count` images.

        Raises:
            QueueFullError: At once, if there is none.
        """
        if self.held + count > self.limits.max_queue:
            raise QueueFullError("the queue is full; try again later")
        self.held += count
        return Place(self, count)

    async def close(self) -> None:
        """Compute what is queued, then end the thread."""
