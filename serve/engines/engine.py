"""What every engine offers, and how a machine runs one. Imports no torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from serve.engines.cores import count_cores
from zoo.card import EngineChoice


@dataclass(frozen=True)
class EngineOptions:
    """How this machine runs an engine: what a card does not say, since it differs from replica to replica.

    Attributes:
        device: "auto" (a GPU where there is one), "cpu", "cuda" or "cuda:1".
        threads: CPU threads of one forward pass; None takes all cores that this process may use.
        max_batch: Most images in one forward pass; a larger batch is cut up.
    """

    device: str = "auto"
    threads: int | None = None
    max_batch: int = 8

    @property
    def num_threads(self) -> int:
        """CPU threads of one forward pass."""
        return self.threads or count_cores()


class Engine(Protocol):
    """A model that computes. One thread at a time may call it."""

    choice: EngineChoice
    device: str

    def run(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        """Compute the logits, (B, K), of preprocessed images, (B, 3, height, width)."""
        ...

    def warm_up(self) -> None:
        """Run each batch size that is prepared, so that no request waits for what happens at the first."""
        ...


def cut(images: NDArray[np.float32], most: int) -> Iterator[NDArray[np.float32]]:
    """Yield images, (B, 3, height, width), in runs of at most `most`; an empty batch as it is."""
    for start in range(0, max(len(images), 1), most):
        yield images[start : start + most]


def list_batch_sizes(max_batch: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... and `max_batch`: what is prepared where each batch size has to be."""
    return (*(2**power for power in range((max_batch - 1).bit_length())), max_batch)
