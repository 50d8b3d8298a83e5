"""A bundle that answers: images in, class probabilities and labels out."""

from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from serve.engines.engine import Engine, EngineOptions
from serve.engines.opening import open_engine
from serve.protocol.schemas import DEFAULT_TOP_K, Prediction, Score
from zoo.card import EngineChoice, ModelCard
from zoo.files.golden import read_bundle_card


class Predictor:
    """An engine with its model's card. One thread at a time may call it.

    Args:
        engine: What computes logits.
        card: The model's card.
        name: What to call it in replies: the registered model's name.
        version: Its version in the registry.
        difference: The largest difference of a logit at the engine's self-test.
    """

    def __init__(
        self,
        engine: Engine,
        card: ModelCard,
        *,
        name: str = "local",
        version: str = "local",
        difference: float | None = None,
    ) -> None:
        self.engine = engine
        self.difference = difference
        self.card = card
        self.name = name
        self.version = version

    @classmethod
    def from_bundle(
        cls,
        path: Path,
        *,
        name: str = "local",
        version: str = "local",
        choice: EngineChoice | None = None,
        options: EngineOptions | None = None,
    ) -> Self:
        """Load the bundle at `path` and prove that it answers its golden example as it did when it was saved.

        Args:
            path: The bundle's directory.
            name: What to call it in replies.
            version: Its version in the registry.
            choice: Another engine than the card's.
            options: How this machine runs it.

        Raises:
            BundleError: If it is damaged, or answers otherwise.
            EngineError: If the engine is not installed here, or cannot run it.
        """
        card = read_bundle_card(path)
        engine, difference = open_engine(path, card, choice=choice, options=options)
        return cls(engine, card, name=name, version=version, difference=difference)

    def predict(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        """Compute class probabilities.

        Args:
            images: Preprocessed images, (B, 3, height, width).

        Returns:
            Probabilities in 0-1, (B, K), each row summing to 1.

        Raises:
            RuntimeError: If the model answers with NaN.
        """
        probabilities = self.compute(images)
        if not np.isfinite(probabilities).all():
            raise RuntimeError("the model's probabilities are not finite")
        return probabilities

    def compute(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        """Compute as `predict` does, but leave a row that is not finite as it is: a batch may be several requests'."""
        logits = self.engine.run(images)
        with np.errstate(invalid="ignore", over="ignore"):
            exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
            probabilities: NDArray[np.float32] = exponentials / exponentials.sum(axis=-1, keepdims=True)
        return probabilities

    def label(self, images: NDArray[np.float32], top_k: int = DEFAULT_TOP_K) -> list[Prediction]:
        """Name the most probable classes of each image; arguments as for `predict`."""
        return self.name_classes(self.predict(images), top_k)

    def name_classes(self, probabilities: NDArray[np.float32], top_k: int = DEFAULT_TOP_K) -> list[Prediction]:
        """Name the `top_k` most probable classes of each row of (B, K)."""
        return [self._name(row, top_k) for row in probabilities]

    def _name(self, probabilities: NDArray[np.float32], top_k: int) -> Prediction:
        best = np.argsort(-probabilities, kind="stable")[:top_k]  # equals keep the order of the classes
        top = [Score(label=self.card.class_names[k], probability=float(probabilities[k])) for k in best]
        return Prediction(label=top[0].label, probability=top[0].probability, top=top)
