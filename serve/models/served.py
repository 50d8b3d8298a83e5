"""A model version while it answers, and the shelf of all that this server answers for."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import numpy as np

from serve.batching.batcher import Batcher, BatchLimits
from serve.batching.turns import turns_on
from serve.errors import NotReadyError, UnknownModelError
from serve.operations.metrics import Metrics
from serve.predictor import Predictor

_WARM_UP_S = 600.0


class ServedModel:
    """One version of one model with its queue. A request uses one from its head to its answer, whatever is swapped."""

    def __init__(self, predictor: Predictor, limits: BatchLimits, metrics: Metrics) -> None:
        self.predictor = predictor
        device = predictor.engine.device
        # On CPUs two models that share the cores freely fill each other's gaps, at the same CPU time per image.
        turns = turns_on(device) if device.startswith("cuda") else None
        self.batcher = Batcher(predictor.compute, limits, metrics, turns)
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

    async def warm_up(self) -> None:
        """Answer one grey image and a full batch the way requests are: its thread and memory are ready afterwards.

        Raises:
            RuntimeError: If it cannot.
        """
        limits = self.batcher.limits
        for count in (1, min(limits.max_batch, limits.max_queue)):
            images = np.zeros((count, 3, *self.predictor.card.preprocessing.size), np.float32)
            with self.batcher.reserve(count) as place:
                await place.run(images, asyncio.get_running_loop().time() + _WARM_UP_S)

    async def retire(self) -> None:
        """Wait until no request uses it, then end its thread."""
        await self._unused.wait()
        await self.batcher.close()


@dataclass(frozen=True)
class Refusal:
    """A version that may not answer.

    Attributes:
        version: Its version in the registry.
        reason: Why; it names no path of this machine.
    """

    version: str
    reason: str


class Shelf:
    """The models of one server by name; the first is the one that `POST /invocations` means.

    Args:
        names: What this server answers for, the default first. Until `put`, a name answers that it is loading.
        metrics: Where versions and the depth of their queues are shown.

    Attributes:
        default: The name that is meant where none is said.
        refused: By name, the newest version that its alias named and that was found broken.
    """

    def __init__(self, names: Sequence[str], metrics: Metrics) -> None:
        self._models: dict[str, ServedModel | None] = dict.fromkeys(names)
        self._retiring: list[ServedModel] = []
        self._metrics = metrics
        self.default = names[0]
        self.refused: dict[str, Refusal] = {}

    @property
    def names(self) -> list[str]:
        """The names, the default first."""
        return list(self._models)

    @property
    def models(self) -> list[ServedModel]:
        """What answers now, the default first."""
        return [served for served in self._models.values() if served is not None]

    @property
    def is_ready(self) -> bool:
        """Whether every name has a model that answers."""
        return all(served is not None and served.batcher.is_alive for served in self._models.values())

    @property
    def is_alive(self) -> bool:
        """Whether every model that is there still computes what it is given."""
        return all(served.batcher.is_alive for served in self.models)

    @property
    def busy_s(self) -> float:
        """Seconds since the oldest running batch began; 0 when none runs."""
        return max((served.batcher.busy_s for served in (*self.models, *self._retiring)), default=0.0)

    def find(self, name: str | None = None, version: str | None = None) -> ServedModel:
        """Return what answers for `name` now, the default without one.

        Raises:
            UnknownModelError: If this server has no such model, or has another version of it.
            NotReadyError: If it is still being loaded.
        """
        name = self.default if name is None else name
        if name in self._models:
            found = self._models[name]
            if found is None:
                raise NotReadyError("the model is still being loaded; try again later", retry_after_s=5)
            if version in (None, found.predictor.version):
                return found
        raise UnknownModelError("no such model here, or not in that version; GET /version lists what is served")

    def swap(self, served: ServedModel) -> ServedModel | None:
        """Let `served` answer for its name from now on; return what did so before, for `put` to retire."""
        name = served.predictor.name
        before = self._models[name]
        self._models[name] = served
        if before is not None:
            self._retiring.append(before)
            self._metrics.model_info.remove(*_labels(before))
        self._metrics.model_info.labels(*_labels(served)).set(1)
        self._metrics.queue_depth.labels(name).set_function(lambda: self._count_held(name))
        return before

    async def put(self, served: ServedModel) -> None:
        """Let `served` answer for its name from now on, and retire what did so before, after its last request."""
        before = self.swap(served)
        if before is not None:
            try:
                await before.retire()
            finally:
                self._retiring.remove(before)

    async def close(self) -> None:
        """Retire all."""
        await asyncio.gather(*(served.retire() for served in (*self.models, *self._retiring)))

    def _count_held(self, name: str) -> float:
        held = [s.batcher.held for s in (*self.models, *self._retiring) if s.predictor.name == name]
        return float(sum(held))


def _labels(served: ServedModel) -> tuple[str, str, str]:
    predictor = served.predictor
    return predictor.name, predictor.version, predictor.engine.choice.name
