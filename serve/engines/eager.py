"""Eager torch."""

from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from serve.engines.engine import EngineOptions, cut
from serve.errors import EngineError
from zoo.bundle import load_bundle
from zoo.card import EngineChoice, ModelCard


class EagerEngine:
    """The model as torch runs it, operation by operation.

    Args:
        model: In eval mode, float32; it is moved to the device.
        card: Its card.
        choice: The precision; bf16 is autocast's.
        options: The device, the threads and the largest batch of this machine.
    """

    def __init__(self, model: nn.Module, card: ModelCard, choice: EngineChoice, options: EngineOptions) -> None:
        self._device = find_device(options.device)
        self.choice, self.device = choice, str(self._device)
        self._shape, self._max_batch = (3, *card.preprocessing.size), options.max_batch
        self._model = model.to(self._device)
        self._staged: Tensor | None = None
        if self._device.type == "cuda":
            self._model.to(memory_format=torch.channels_last)
            self._staged = torch.empty((self._max_batch, *self._shape), pin_memory=True)
        elif options.threads is not None:
            torch.set_num_threads(options.threads)  # of this process: torch knows no other kind

    def run(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        """Compute the logits, (B, K), of preprocessed images, (B, 3, height, width)."""
        with torch.inference_mode(), self._autocast():
            return torch.cat(
                [self._compute(self._place(some)).float().cpu() for some in cut(images, self._max_batch)]
            ).numpy()

    def warm_up(self) -> None:
        """Run one image and a full batch: memory is allocated, kernels are chosen."""
        for count in (1, self._max_batch):
            self.run(np.zeros((count, *self._shape), dtype=np.float32))

    def _compute(self, images: Tensor) -> Tensor:
        logits = self._model(images)
        assert isinstance(logits, Tensor)
        return logits

    def _autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self.choice.precision == "bf16")

    def _place(self, images: NDArray[np.float32]) -> Tensor:
        """Bring images to the device; to a GPU from page-locked memory, so that the copy needs no wait."""
        if self._staged is None:
            return torch.from_numpy(images)
        staged = self._staged[: len(images)]
        staged.copy_(torch.from_numpy(images))  # the one before has been read: its logits were waited for
        return staged.to(self._device, non_blocking=True, memory_format=torch.channels_last)


def find_device(name: str) -> torch.device:
    """Return the device of a name, "auto" being a GPU where there is one.

    Raises:
        EngineError: If there is no such device here.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda" if count else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= count:
        raise EngineError(f"device {name}: torch finds {count} GPUs here; give --device cpu, or auto")
    return device


def build_engine(bundle: Path, card: ModelCard, choice: EngineChoice, options: EngineOptions) -> EagerEngine:
    """Load the bundle's model, checked against its hashes."""
    return EagerEngine(load_bundle(bundle)[0], card, choice, options)
