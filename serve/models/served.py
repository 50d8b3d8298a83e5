"""A model version while it answers, and the shelf of all that this server answers for."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self

from serve.batching.batcher import Batcher, BatchLimits
from serve.errors import UnknownModelError
from serve.operations.metrics import Metrics
from serve.predictor import Predictor


class ServedModel:
    """One version of one model with its queue. A request uses one from its head to its answer, whatever is swapped."""

    def __init__(self, predictor: Predictor, limits: BatchLimits, metrics: Metrics) -> None:
        self.predictor = predictor
        self.batcher = Batcher(predictor.predict, limits, metrics)
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()

    @contextmanager
    def use(self) -> Iterator[Self]:
        """Keep this version alive for the length of a request."""
        self._users += 1
        self._unused.clear()
        try:
            yield self
        finally:
            self._users -= 1
            if not self._users:
                self._unused.set()

    async def retire(self) -> None:
        """Wait until no request uses it, then end its thread."""
        await self._unused.wait()
        await self.batcher.close()


class Shelf:
    """The models of one server by name; the first is the one that `POST /invocations` means."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = {served.predictor.name: served for served in models}
        self.default = models[0].predictor.name

    @property
    def names(self) -> list[str]:
        """The names, the default first."""
        return list(self._models)

    def find(self, name: str | None = None, version: str | None = None) -> ServedModel:
        """Return what answers for `name` now, the default without one.

        Raises:
            UnknownModelError: If this server has no such model, or has another version of it.
        """
        found = self._models.get(self.default if name is None else name)
        if found is None or version not in (None, found.predictor.version):
            raise UnknownModelError("no such model here, or not in that version; GET /version lists what is served")
        return found

    async def put(self, served: ServedModel) -> None:
        """Let `served` answer for its name from now on, and retire what did so before."""
        before = self._models.get(served.predictor.name)
        self._models[served.predictor.name] = served
        if before is not None:
            await before.retire()

    async def close(self) -> None:
        """Retire all."""
        for served in self._models.values():
            await served.retire()
