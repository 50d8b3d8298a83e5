"""Keeping the shelf stocked: every model loaded at the start, while the socket listens already, and then followed."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from serve.models.follow import Follower
from serve.models.load import Loader
from serve.models.served import Shelf
from serve.models.uris import ModelUri
from serve.operations.memory import trim_memory
from serve.operations.metrics import Metrics
from serve.settings import Settings

logger = logging.getLogger(__name__)


class Keeper:
    """Loads what the settings name, then follows the aliases among it.

    Args:
        settings: What to load, and how; whether to follow.
        uris: `settings.model_uri`, split.
        shelf: An empty shelf of their names.
        metrics: Where outcomes are counted.
    """

    def __init__(self, settings: Settings, uris: list[ModelUri], shelf: Shelf, metrics: Metrics) -> None:
        self._settings, self._uris, self._shelf, self._metrics = settings, uris, shelf, metrics

    async def keep(self, on_ready: Callable[[], None], on_failure: Callable[[Exception], None]) -> None:
        """Load all, then follow until cancelled.

        Args:
            on_ready: Called once, when every model has answered.
            on_failure: Told what `Loader.load` raises, if a model cannot be loaded at the start: there is nothing to
                go on with then. Later nothing is told: what answers goes on.
        """
        try:
            await self._keep(on_ready)
        except Exception as error:  # of any kind: whoever started this server decides
            on_failure(error)

    async def _keep(self, on_ready: Callable[[], None]) -> None:
        with TemporaryDirectory(prefix="serve-", ignore_cleanup_errors=True) as folder:
            loader = Loader(self._settings, self._metrics, Path(folder))
            followers = []
            for uri in self._uris:
                served, found = await loader.load(uri)
                await self._shelf.put(served)
                if uri.alias and not self._settings.pin:
                    followers.append(Follower(uri, found, self._shelf, loader, self._metrics))
            await asyncio.to_thread(trim_memory)
            on_ready()
            async with asyncio.TaskGroup() as group:
                for follower in followers:
                    group.create_task(follower.follow(self._settings.poll_interval_s))
