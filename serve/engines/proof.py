"""The proof, before a bundle may be published or named: its engine computes what torch does with the same weights."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from serve.engines.engine import Engine, EngineOptions
from serve.engines.opening import open_engine
from serve.engines.self_test import TOLERANCES, ask, compare
from serve.errors import EngineError
from zoo.card import EngineChoice
from zoo.errors import BundleError, UnfitEngineError
from zoo.files.golden import read_bundle_card

if TYPE_CHECKING:
    from torch import nn

BATCH_SIZES: Final = (1, 2, 8)
ONNX_TOLERANCE: Final = 1e-4
"""Largest difference of a logit, relative to the largest (at least 1), between torch and ONNX Runtime on one CPU.

Measured on trained and fresh ViT, Swin, LeViT and EVA-02: 1e-7 to 1e-6.
"""

Measure = Callable[[Engine, float], Mapping[str, float]]


def proving(measure: Measure | None = None) -> "Callable[[Path, nn.Module], Mapping[str, float]]":
    """Return what `zoo.save_bundle` takes as `prove`: it compares the engine of the card with the model.

    Args:
        measure: Called with the engine, warm, and its largest difference from the model; returns metrics for the card.
    """

    def prove(bundle: Path, model: "nn.Module") -> Mapping[str, float]:
        engine, difference = prove_engine(bundle, model)
        return {} if measure is None else measure(engine, difference)

    return prove


def prove_engine(bundle: Path, model: "nn.Module") -> tuple[Engine, float]:
    """Open the engine that the card of `bundle` names, and compare it with eager float32 torch on several batch sizes.

    An ONNX file is compared on the CPU, so that nothing but the file can differ; others on the GPU where there is one.

    Args:
        bundle: The bundle's directory.
        model: Its model, in eval mode on the CPU.

    Returns:
        The engine, and the largest difference of a logit, of the golden example and of seeded noise.

    Raises:
        UnfitEngineError: If the engine cannot compute the model here, or computes something else.
    """
    from serve.engines.eager import EagerEngine

    card = read_bundle_card(bundle)
    is_onnx = card.engine.name == "onnx"
    options = EngineOptions(device="cpu" if is_onnx else "auto", max_batch=max(BATCH_SIZES))
    reference = EagerEngine(model, card, EngineChoice(), EngineOptions(device="cpu", max_batch=max(BATCH_SIZES)))
    noise = np.random.default_rng(0)
    try:
        engine, difference = open_engine(bundle, card, options=options)
        for count in BATCH_SIZES:
            images = noise.standard_normal((count, 3, *card.preprocessing.size), dtype=np.float32)
            what, tolerance = f"{bundle}: seeded noise", ONNX_TOLERANCE if is_onnx else TOLERANCES["bf16"]
            apart = compare(ask(engine, images, what), reference.run(images), card.engine, what, tolerance)
            difference = max(difference, apart)
    except UnfitEngineError:
        raise
    except (BundleError, EngineError) as error:
        raise UnfitEngineError(str(error)) from error
    return engine, difference
