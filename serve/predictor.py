"""A bundle that answers: images in, class probabilities and labels out."""

from pathlib import Path
from threading import Lock
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from serve.schemas import DEFAULT_TOP_K, Prediction, Score
from zoo.bundle import check_golden, load_bundle
from zoo.card import ModelCard


class Predictor:
    """A model with its card. Threads may share it: one forward pass runs at a time, on all of torch's threads.

    Args:
        model: The model, in eval mode.
        card: Its card.
        name: What to call it in replies: the registered model's name.
        version: Its version in the registry.
    """

    def __init__(self, model: nn.Module, card: ModelCard, *, name: str = "local", version: str = "local") -> None:
        self.card = card
        self.name = name
        self.version = version
        self._model = model
        self._lock = Lock()

    @classmethod
    def from_bundle(cls, path: Path, *, name: str = "local", version: str = "local") -> Self:
        """Load the bundle at `path` and prove that it answers its golden example as it did when it was saved.

        Raises:
            BundleError: If it is damaged, or answers otherwise.
        """
        model, card = load_bundle(path)
        check_golden(model, path)
        return cls(model, card, name=name, version=version)

    def predict(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        """Compute class probabilities.

        Args:
            images: Preprocessed images, (B, 3, height, width).

        Returns:
            Probabilities in 0-1, (B, K), each row summing to 1.

        Raises:
            RuntimeError: If the model answers with NaN.
        """
        with self._lock, torch.inference_mode():
            logits = self._model(torch.from_numpy(images))
            probabilities: NDArray[np.float32] = logits.float().softmax(dim=-1).numpy()
        if not np.isfinite(probabilities).all():
            raise RuntimeError("the model's probabilities are not finite")
        return probabilities

    def label(self, images: NDArray[np.float32], top_k: int = DEFAULT_TOP_K) -> list[Prediction]:
        """Name the most probable classes of each image; arguments as for `predict`."""
        return [self._name(row, top_k) for row in self.predict(images)]

    def _name(self, probabilities: NDArray[np.float32], top_k: int) -> Prediction:
        best = np.argsort(-probabilities, kind="stable")[:top_k]  # equals keep the order of the classes
        top = [Score(label=self.card.class_names[k], probability=float(probabilities[k])) for k in best]
        return Prediction(label=top[0].label, probability=top[0].probability, top=top)
