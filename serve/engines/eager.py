"""Eager torch."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from serve.engines.engine import EngineOptions
from zoo.bundle import load_bundle
from zoo.card import EngineChoice, ModelCard


class EagerEngine:
    """The model as torch runs it, operation by operation."""

    def __init__(self, model: nn.Module, choice: EngineChoice, device: str = "cpu") -> None:
        self.choice, self.device = choice, device
        self._model = model

    def run(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        """Compute the logits, (B, K), of preprocessed images, (B, 3, height, width)."""
        with torch.inference_mode():
            logits: NDArray[np.float32] = self._model(torch.from_numpy(images)).float().numpy()
        return logits


def build_engine(bundle: Path, card: ModelCard, choice: EngineChoice, options: EngineOptions) -> EagerEngine:
    """Load the bundle's model, checked against its hashes and its golden example's shapes."""
    del card, options
    return EagerEngine(load_bundle(bundle)[0], choice)
