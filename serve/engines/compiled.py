"""torch.compile."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from serve.engines.eager import EagerEngine
from serve.engines.engine import EngineOptions, list_batch_sizes
from serve.engines.self_test import tell
from serve.errors import EngineError
from zoo.bundle import load_bundle
from zoo.card import EngineChoice, ModelCard

_PROGRAMS = 4096
"""Beyond its limit, of 8, torch would go on without compiling, and say so in a warning alone."""


class CompiledEngine(EagerEngine):
    """The model as torch.compile makes it: on a GPU as CUDA graphs, one for each batch size that is prepared.

    A CUDA graph has fixed shapes, so a batch is filled up with zeros to the next prepared size. On a CPU one program
    serves every batch size but 1, which has its own.
    """

    def __init__(self, model: nn.Module, card: ModelCard, choice: EngineChoice, options: EngineOptions) -> None:
        super().__init__(model, card, choice, options)
        torch._dynamo.config.recompile_limit = _PROGRAMS  # of one class of model: batch sizes, models, reloads
        torch._dynamo.config.accumulated_recompile_limit = _PROGRAMS
        on_gpu = self._device.type == "cuda"
        self.batch_sizes = list_batch_sizes(self._max_batch) if on_gpu else (1, 2)[: self._max_batch]
        self._fixed = on_gpu
        if on_gpu:
            self._compiled = torch.compile(self._model, mode="reduce-overhead", dynamic=False)
        else:
            self._compiled = torch.compile(self._model)

    def warm_up(self) -> None:
        """Run each prepared batch size; the second time, on a GPU, records its graph."""
        for count in self.batch_sizes:
            for _ in range(3 if self._fixed else 1):
                self.run(np.zeros((count, *self._shape), dtype=np.float32))

    def _compute(self, images: Tensor) -> Tensor:
        count = len(images)
        if self._fixed:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            images = self._fill_up(images)
        elif count > 1:
            torch._dynamo.mark_dynamic(images, 0)
        logits = self._compiled(images)
        assert isinstance(logits, Tensor)
        return logits[:count]

    def _fill_up(self, images: Tensor) -> Tensor:
        size = next(size for size in self.batch_sizes if size >= len(images))
        if size == len(images):
            return images
        missing = images.new_zeros((size - len(images), *images.shape[1:]))
        return torch.cat([images, missing]).contiguous(memory_format=torch.channels_last)


def build_engine(bundle: Path, card: ModelCard, choice: EngineChoice, options: EngineOptions) -> CompiledEngine:
    """Load the bundle's model, checked against its hashes, and compile it: this takes a quarter of a minute or more.

    Raises:
        BundleError: If the bundle is damaged.
        EngineError: If torch.compile cannot compile it here; one line that names the cause.
    """
    engine = CompiledEngine(load_bundle(bundle)[0], card, choice, options)
    try:
        engine.run(np.zeros((1, 3, *card.preprocessing.size), dtype=np.float32))
    except Exception as error:  # a compiler that is missing, an operator it does not know: of any class
        raise EngineError(
            f"{bundle}: torch.compile cannot compile it here ({tell(error)}); on a CPU it takes a C++ compiler; give "
            "another engine by --engine eager"
        ) from error
    return engine
