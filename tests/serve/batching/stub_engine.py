"""An engine of two lines whose gate a test shuts, and the requests that ask it."""

import asyncio
import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from serve.batching.batcher import Batcher

Array = NDArray[np.float32]


class Engine:
    """Answers each image with its first pixel and twice that; holds every batch while its gate is shut."""

    def __init__(self) -> None:
        self.batches: list[list[float]] = []
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()
        self.before: Callable[[Array], None] = lambda _: None

    def __call__(self, images: Array) -> Array:
        self.batches.append(images[:, 0, 0, 0].tolist())
        self.entered.set()
        assert self.gate.wait(30)
        self.before(images)
        return np.stack([images[:, 0, 0, 0], 2 * images[:, 0, 0, 0]], axis=1)

    async def shut(self, batcher: Batcher) -> asyncio.Task[Array]:
        """Shut the gate and send image -1, so that the engine is busy and all that comes now waits."""
        self.gate.clear()
        self.entered.clear()
        task = asyncio.create_task(ask(batcher, -1))
        await until(self.entered.is_set)
        return task


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_so():
            await asyncio.sleep(0.001)


async def ask(batcher: Batcher, *values: float, within: float = 30) -> Array:
    images = np.zeros((len(values), 3, 2, 2), np.float32)
    images[:, 0, 0, 0] = values
    with batcher.reserve(len(values)) as place:
        return await place.run(images, asyncio.get_running_loop().time() + within)
