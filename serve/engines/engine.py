"""What every engine offers, and the one place where an engine is opened. Imports no torch by itself."""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from serve.engines.self_test import check_engine
from zoo.card import EngineChoice, ModelCard

_HOMES = {"eager": "eager", "compile": "compiled", "onnx": "onnx"}
"""The module below serve.engines that builds each, loaded only when it is wanted: the image for ONNX has no torch."""


@dataclass(frozen=True)
class EngineOptions:
    """How this machine runs an engine: what a card does not say, since it differs from replica to replica.

    Attributes:
        device: "auto" (a GPU where there is one), "cpu", "cuda" or "cuda:1".
        threads: CPU threads of one forward pass; None takes all cores.
        max_batch: Most images in one forward pass, for what is prepared by batch size.
    """

    device: str = "auto"
    threads: int | None = None
    max_batch: int = 8


class Engine(Protocol):
    """A model that computes. One thread at a time may call it."""

    choice: EngineChoice
    device: str

    def run(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        """Compute the logits, (B, K), of preprocessed images, (B, 3, height, width)."""
        ...


def open_engine(
    bundle: Path, card: ModelCard, *, choice: EngineChoice | None = None, options: EngineOptions | None = None
) -> Engine:
    """Open the engine that the card chooses, or `choice`, and prove that it answers as the bundle did when saved.

    Raises:
        BundleError: If the bundle is damaged or answers otherwise.
        EngineError: If that engine is not installed here, or cannot run this bundle.
    """
    wanted = choice or card.engine
    module = import_module(f"serve.engines.{_HOMES[wanted.name]}")
    engine: Engine = module.build_engine(bundle, card, wanted, options or EngineOptions())
    check_engine(engine, bundle, card)
    return engine
