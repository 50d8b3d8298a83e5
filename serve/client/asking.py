"""Ask about many files, few at a time, and tell each answer in the order of the files as soon as it is known."""

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass
from pathlib import Path

from serve.client.connection import Client
from serve.client.errors import ClientError
from serve.protocol.schemas import Prediction

_AHEAD = 4
"""Files that are begun behind one that is slow, in multiples of the client's concurrency."""


@dataclass(frozen=True)
class Outcome:
    """What became of one file: its prediction, or the reason why there is none."""

    path: Path
    prediction: Prediction | None = None
    failure: str = ""

    def to_tsv(self) -> str:
        """Write path, label and probability; what is not printable in them is escaped as Python does."""
        assert self.prediction is not None
        words = (str(self.path), self.prediction.label, f"{self.prediction.probability:.6f}")
        return "\t".join(map(_escape, words))

    def to_json(self) -> str:
        """Write one JSON object on one line."""
        assert self.prediction is not None
        return json.dumps({"image": str(self.path), **self.prediction.model_dump()}, ensure_ascii=False)


async def ask_all(client: Client, paths: Iterable[Path], concurrency: int) -> AsyncGenerator[Outcome, None]:
    """Yield an outcome for each file, in their order; after a failure that concerns all, no further file is asked."""
    hopeless: list[str] = []
    pending: deque[asyncio.Task[Outcome]] = deque()
    try:
        for path in paths:
            if len(pending) >= _AHEAD * concurrency:
                yield await pending.popleft()
            pending.append(asyncio.create_task(_ask(client, path, hopeless)))
        while pending:
            yield await pending.popleft()
    finally:
        for task in pending:
            task.cancel()


async def _ask(client: Client, path: Path, hopeless: list[str]) -> Outcome:
    if hopeless:
        return Outcome(path, failure=f"not asked: {hopeless[0]}")
    try:
        return Outcome(path, await client.predict_file(path))
    except ClientError as error:
        if error.concerns_all:
            hopeless.append(str(error))
        return Outcome(path, failure=str(error))
    except OSError as error:
        return Outcome(path, failure=f"cannot be read: {error.strerror}")


def _escape(text: str) -> str:
    if text.isprintable() and "\\" not in text:
        return text
    return "".join(c if c.isprintable() and c != "\\" else c.encode("unicode_escape").decode() for c in text)
