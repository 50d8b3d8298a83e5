"""A follower that a test looks through by hand."""

import asyncio
import threading
from pathlib import Path

from serve.models.follow import Follower
from serve.models.load import Loader
from serve.models.served import Shelf
from serve.models.uris import parse_uri
from serve.operations.metrics import Metrics
from serve.settings import Settings

OURS, OTHERS = frozenset({"日本 語", "é", "ash"}), frozenset({"cat", "dog"})
"""The classes of the model that is served first, and of the other one."""


class Stand:
    """A follower with its shelf, looked through by hand."""

    def __init__(self, uri: str, folder: Path) -> None:
        self.metrics = Metrics()
        self.uri = parse_uri(uri)
        self.shelf = Shelf([self.uri.name], self.metrics)
        self.loader = Loader(Settings(model_uri=(uri,), threads=1), self.metrics, folder)

    async def start(self) -> "Stand":
        served, found = await self.loader.load(self.uri)
        await self.shelf.put(served)
        self.follower = Follower(self.uri, found, self.shelf, self.loader, self.metrics)
        return self

    @property
    def version(self) -> str:
        return self.shelf.find().predictor.version

    def count(self, outcome: str) -> float:
        labels = {"model": self.uri.name, "outcome": outcome}
        return self.metrics.registry.get_sample_value("serve_reloads_total", labels) or 0.0


async def ended(name: str, but: int = 0) -> None:
    """Wait until only so many threads of this name are left."""
    async with asyncio.timeout(30):
        while [thread.name for thread in threading.enumerate()].count(name) != but:
            await asyncio.sleep(0.01)
