"""From requests to batches. Places are bounded; a request holds its places from before its images are decoded.

The event loop hands images over and takes rows back; one thread forms the batches and computes. While it computes,
images gather: the next batch is what came meanwhile. Only an idle engine waits, and only for images that are known to
be on their way (a place is held, they are being decoded), so a lone request never waits.
"""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from serve.batching.shares import Job, Share, share_out
from serve.errors import DeadlineError, QueueFullError
from serve.operations.metrics import Metrics

Predict = Callable[[NDArray[np.float32]], NDArray[np.float32]]

_LONGEST_RETRY_S = 60
_SMOOTHING = 0.2  # weight of the newest batch in the measured time per image

logger = logging.getLogger(__name__)


class NotFiniteError(RuntimeError):
    """A model answered an image with NaN or infinity."""


@dataclass(frozen=True)
class BatchLimits:
    """How requests become batches.

    Attributes:
        max_batch: Most images in one batch.
        wait_s: Longest that an image waits, while the engine is idle, for others that are being decoded, in seconds.
        max_queue: Most images that hold a place, the ones being decoded and computed included.
    """

    max_batch: int = 8
    wait_s: float = 0.002
    max_queue: int = 128


class Place:
    """What a request holds in the queue: room for its images. Leaving the block gives it back, however it is left."""

    def __init__(self, batcher: "Batcher", count: int) -> None:
        self._batcher, self._count = batcher, count
        self._is_coming = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._arrive()
        self._batcher.held -= self._count

    async def run(self, images: NDArray[np.float32], deadline: float) -> NDArray[np.float32]:
        """Wait for the probabilities, (B, K), of preprocessed images, (B, 3, height, width).

        Args:
            images: No more of them than the place has room for.
            deadline: When to give up, on the clock of `asyncio.get_running_loop().time()`.

        Raises:
            DeadlineError: If it passes first; images not yet computed are dropped.
            NotFiniteError: If the engine answers one of these images with NaN or infinity.
            RuntimeError: If the engine fails.
        """
        if not 0 < len(images) <= self._count:
            raise ValueError(f"got {len(images)} images, this place has room for 1 to {self._count}")
        self._arrive()
        job = Job(images, asyncio.get_running_loop().create_future(), deadline, time.monotonic())
        self._batcher._submit(job)
        try:
            async with asyncio.timeout_at(deadline):
                return await job.done
        except TimeoutError as error:
            raise DeadlineError("no answer within the time that a request may take") from error
        finally:
            if job.left:  # not all of it was computed
                self._batcher._withdraw(job)

    def _arrive(self) -> None:
        if self._is_coming:
            self._is_coming = False
            self._batcher._coming -= self._count


class Batcher:
    """The queue before one model, and the thread that computes. The thread starts with the first images.

    Args:
        predict: (B, 3, height, width) to (B, K); called by one thread at a time.
        limits: How requests become batches.
        metrics: Where batches and times are counted.
        turns: Held while a batch is formed and computed, so that the models of one device do not compute at once.

    Attributes:
        held: Images that hold a place now.
    """

    def __init__(
        self, predict: Predict, limits: BatchLimits, metrics: Metrics, turns: AbstractContextManager[None] | None = None
    ) -> None:
        self.limits = limits
        self.held = 0
        self._predict: Predict | None = predict
        self._turns = nullcontext() if turns is None else turns
        self._batch_sizes = metrics.batch_size
        self._queue_times, self._engine_times = metrics.stages.labels("queue"), metrics.stages.labels("engine")
        self._coming = 0  # of those held, the images that are not yet decoded
        self._seconds_per_image = 0.0
        # What loop and thread share, guarded by `_changed`.
        self._changed = threading.Condition()
        self._waiting: dict[Job, None] = {}  # in order of arrival
        self._queued = 0  # images in `_waiting`
        self._is_idle = self._is_gathering = self._is_closing = False
        self._batches = 0
        self._started: float | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = asyncio.Event()

    def reserve(self, count: int) -> Place:
        """Take room for `count` images.

        Raises:
            QueueFullError: At once, if there is none; it says when to try again, by the rate measured so far.
        """
        self.check_room(count)
        self.held += count
        self._coming += count
        return Place(self, count)

    def check_room(self, count: int = 1) -> None:
        """Raise what `reserve` would, and take nothing."""
        if self.held + count > self.limits.max_queue:
            seconds = math.ceil(self.held * self._seconds_per_image)
            raise QueueFullError("the queue is full; try again later", min(max(1, seconds), _LONGEST_RETRY_S))

    @property
    def is_alive(self) -> bool:
        """Whether images would be computed: False once the thread has ended."""
        return not self._is_closing and (self._thread is None or self._thread.is_alive())

    @property
    def busy_s(self) -> float:
        """Seconds since the running batch began, 0 when none runs: what grows without end when the engine hangs."""
        started = self._started
        return 0.0 if started is None else time.monotonic() - started

    async def close(self, within_s: float = 10.0) -> None:
        """Compute what is queued, then end the thread; an engine that hangs for `within_s` seconds is left behind."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread is None or not self._thread.is_alive():
            self._predict = None
            return
        try:
            async with asyncio.timeout(within_s):
                await self._ended.wait()
        except TimeoutError:
            logger.error("the engine did not end its batch within %s s and is left behind", within_s)

    def _submit(self, job: Job) -> None:
        if self._thread is None:
            self._loop = asyncio.get_running_loop()
            self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
            self._thread.start()
        with self._changed:
            if self._is_closing:
                raise RuntimeError("this model is closed")
            self._waiting[job] = None
            self._queued += job.left
            if self._is_idle or (self._is_gathering and self._has_enough()):
                self._is_idle = False  # woken once is enough
                self._changed.notify()

    def _withdraw(self, job: Job) -> None:
        with self._changed:
            if job in self._waiting:
                del self._waiting[job]
                self._queued -= job.left

    def _has_enough(self) -> bool:
        return self._queued >= self.limits.max_batch or not self._coming

    def _work(self) -> None:
        """Compute batch after batch until closed; the thread's own function."""
        try:
            while self._await_images():
                with self._turns:  # taken before the batch is: what comes while another model computes is in it
                    self._compute(self._take())
        finally:
            self._predict = None  # the model's memory goes when the last request has, not when we are collected
            self._post(self._ended.set)

    def _await_images(self) -> bool:
        """Sleep until there is something to compute; False once there never will be."""
        with self._changed:
            was_idle = not self._waiting
            while not self._waiting:
                if self._is_closing:
                    return False
                self._is_idle = True
                self._changed.wait()
                self._is_idle = False
            if was_idle and self.limits.wait_s:
                self._is_gathering = True
                self._changed.wait_for(self._has_enough, self.limits.wait_s)
                self._is_gathering = False
        return True

    def _take(self) -> list[Share]:
        """Take the next batch out of the queue; none if all was withdrawn meanwhile."""
        now = time.monotonic()
        with self._changed:
            for job in [job for job in self._waiting if job.deadline <= now]:  # the loop is late to say so
                del self._waiting[job]
                self._queued -= job.left
            self._batches += 1
            shares = share_out(self._waiting, self.limits.max_batch, self._batches % 2)
            for job, start, stop in shares:
                self._queued -= stop - start
                job.left -= stop - start
                if not job.left:
                    job.taken = now
                    del self._waiting[job]
        return shares

    def _compute(self, shares: list[Share]) -> None:
        if not shares:
            return
        assert self._predict is not None
        self._started = started = time.monotonic()
        try:
            parts = [job.images[start:stop] for job, start, stop in shares]
            images = parts[0] if len(parts) == 1 else np.concatenate(parts)
            rows = self._predict(images)
            if len(rows) != len(images):
                raise RuntimeError(f"the engine answered {len(rows)} rows for {len(images)} images")
            self._post(self._deliver, shares, rows, np.isfinite(rows).all(axis=-1), time.monotonic() - started)
        except Exception as error:  # any: the batch's requests fail, the server lives on
            self._post(self._fail, shares, error)
        finally:
            self._started = None

    def _post(self, function: Callable[..., object], *arguments: object) -> None:
        """Call on the event loop; nothing where that has ended, since then nobody waits any more."""
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def _deliver(
        self, shares: list[Share], rows: NDArray[np.float32], is_finite: NDArray[np.bool_], seconds: float
    ) -> None:
        """Hand each request its rows; a row that is not finite hurts the request that asked for it alone."""
        new = seconds / len(rows)
        self._seconds_per_image += (new - self._seconds_per_image) * (_SMOOTHING if self._seconds_per_image else 1)
        self._batch_sizes.observe(len(rows))
        self._engine_times.observe(seconds)
        at = 0
        for job, start, stop in shares:
            end = at + stop - start
            if job.done.done():
                pass  # it left, or another of its images failed
            elif not is_finite[at:end].all():
                self._end(job, NotFiniteError("the model's probabilities are not finite"))
            elif job.add(rows[at:end], start, stop):
                self._queue_times.observe(job.taken - job.entered)
            at = end

    def _fail(self, shares: list[Share], error: Exception) -> None:
        for job, _, _ in shares:
            failure = RuntimeError(f"the engine failed ({type(error).__name__})")
            failure.__cause__ = error
            self._end(job, failure)

    def _end(self, job: Job, failure: RuntimeError) -> None:
        if not job.done.done():
            job.done.set_exception(failure)  # it withdraws what is left itself
