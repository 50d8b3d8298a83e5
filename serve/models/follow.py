"""Following an alias: the version that it comes to mean is loaded beside the one that answers, proven, and swapped."""

import asyncio
import logging
import random

from serve.errors import LocateError, OutOfReachError
from serve.models.aside import run_aside
from serve.models.load import Loader, explain, is_understood
from serve.models.served import Refusal, Shelf
from serve.models.uris import FoundVersion, ModelUri
from serve.operations.memory import trim_memory
from serve.operations.metrics import Metrics

logger = logging.getLogger(__name__)


class Follower:
    """Keeps one name on the shelf at the version that its alias means.

    Nothing that goes wrong here reaches a request: what answers goes on until what is to replace it has answered. A
    version that is refused is not tried again until the alias has been elsewhere.

    Args:
        uri: A URI with an alias.
        current: What it meant when the model on the shelf was loaded.
        shelf: Where to put what is loaded.
        loader: What loads.
        metrics: Where outcomes are counted.
    """

    def __init__(self, uri: ModelUri, current: FoundVersion, shelf: Shelf, loader: Loader, metrics: Metrics) -> None:
        self._uri, self._current, self._shelf, self._loader = uri, current, shelf, loader
        self._reloads = metrics.reloads
        self._refused: FoundVersion | None = None
        self._trouble = ""
        for outcome in ("swapped", "refused", "unreachable"):  # from 0 on: a series that begins at 1 shows no increase
            self._reloads.labels(uri.name, outcome)

    async def follow(self, interval_s: float) -> None:
        """Look again and again, until cancelled.

        Args:
            interval_s: Seconds between two looks, give or take a tenth: replicas shall not ask all at once.
        """
        while True:
            await asyncio.sleep(interval_s * random.uniform(0.9, 1.1))
            await self.look()

    async def look(self) -> None:
        """Ask once what the alias means, and serve that if it is new and sound."""
        try:
            found = await run_aside(_find, self._uri)
            if found == self._current:
                self._refused = None
                self._shelf.refused.pop(self._uri.name, None)
            elif found != self._refused:
                await self._take(found)
        except OutOfReachError as error:
            self._count("unreachable")
            self._warn("out of reach", str(error))
        except (LocateError, OSError) as error:  # no alias or model any more; or a full disk: no fault of the version's
            self._warn(str(error), str(error))
        except Exception as error:  # whatever else it is, the server goes on
            self._warn(repr(error), f"{self._uri.text}: cannot be followed", error)
        else:
            if self._trouble:
                logger.info("%s: the registry answers again", self._uri.text)
            self._trouble = ""

    async def _take(self, found: FoundVersion) -> None:
        """Load a version and swap it in, or refuse it; raise what is no fault of the version's."""
        try:
            await self._swap(found)
        finally:
            await asyncio.to_thread(trim_memory)

    async def _swap(self, found: FoundVersion) -> None:
        name, before = self._uri.name, self._current.version
        try:
            served, _ = await self._loader.load(self._uri, found)
        except (OutOfReachError, OSError):
            raise
        except Exception as error:  # of any kind: what cannot be loaded must not replace what answers
            self._refused = found
            self._shelf.refused[name] = Refusal(found.version, explain(error))
            self._count("refused")
            line = "%s: version %s is refused, version %s keeps serving: %s"
            trace = None if is_understood(error) else error
            logger.error(line, name, found.version, before, " ".join(str(error).split()), exc_info=trace)
            return
        self._current, self._refused = found, None
        self._shelf.refused.pop(name, None)
        self._count("swapped")
        logger.info("%s: version %s answers from now on, no longer version %s", name, found.version, before)
        await self._shelf.put(served)

    def _count(self, outcome: str) -> None:
        self._reloads.labels(self._uri.name, outcome).inc()

    def _warn(self, trouble: str, line: str, error: Exception | None = None) -> None:
        """Say once what stands in the way, until it is gone or is another thing."""
        if trouble != self._trouble:
            self._trouble = trouble
            logger.warning("%s; version %s keeps serving", line, self._current.version, exc_info=error)


def _find(uri: ModelUri) -> FoundVersion:
    from serve.models.registry import find_version

    return find_version(uri)
