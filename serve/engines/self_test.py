"""The proof, before an engine may answer: the golden example that is stored with the bundle, alone and in a batch."""

from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from serve.engines.engine import Engine
from serve.errors import EngineError
from zoo.card import EngineChoice, ModelCard
from zoo.errors import BundleError
from zoo.files.bundle_files import GOLDEN
from zoo.files.golden import GOLDEN_TOLERANCE, read_golden

TOLERANCES: Final = {"fp32": GOLDEN_TOLERANCE, "bf16": 5e-2}
"""Largest difference of a logit, relative to the largest logit (at least 1), by precision.

A bfloat16 keeps 8 bits, 0.4 % of a number; through a dozen blocks the logits of trained ViTs moved by 1 to 2 %.
"""

COPIES: Final = 3
"""Batch size in which the golden example must give what it gives alone; no power of two, so that padding is met."""


def check_engine(engine: Engine, bundle: Path, card: ModelCard) -> float:
    """Ask `engine` the golden input of the bundle, alone and in a batch; return the largest difference of a logit.

    Raises:
        BundleError: If it is beyond the tolerance of the engine's precision, or not finite.
        EngineError: If the engine fails.
    """
    golden, what = read_golden(bundle, card), f"{bundle / GOLDEN}"
    batches = [np.repeat(golden.image, count, axis=0) for count in (1, COPIES)]
    return max(compare(ask(engine, images, what), golden.logits, engine.choice, what) for images in batches)


def ask(engine: Engine, images: NDArray[np.float32], what: str) -> NDArray[np.float32]:
    """Run an engine that is not proven yet; raise EngineError, in one line, for whatever it raises."""
    try:
        return engine.run(images)
    except Exception as error:  # the libraries' errors have no kind in common
        raise EngineError(
            f"{what}: engine {engine.choice.name} fails at a batch of {len(images)}: {tell(error)}"
        ) from error


def tell(error: Exception) -> str:
    """Return what an error of a library says in one line: its kind, and the first line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def compare(
    got: NDArray[np.float32], wanted: NDArray[np.float32], choice: EngineChoice, what: str, tolerance: float = np.inf
) -> float:
    """Return the largest difference of two batches of logits.

    Args:
        got: An engine's logits, (B, K).
        wanted: What they are to be, (B, K) or (1, K).
        choice: The engine, for the tolerance and the message.
        what: What was asked, for the message.
        tolerance: A closer one than that of the precision.

    Raises:
        BundleError: If it is beyond the tolerance, or not finite; or if the shapes differ.
    """
    if got.shape[1:] != wanted.shape[1:] or len(wanted) not in (1, len(got)):
        raise BundleError(f"{what}: engine {choice.name}: got logits of {got.shape}, wanted {wanted.shape}")
    difference = float(np.abs(got - wanted).max())
    most = min(TOLERANCES[choice.precision], tolerance) * max(1.0, float(np.abs(wanted).max()))
    if not difference <= most:  # a NaN too
        raise BundleError(
            f"{what}: the logits of engine {choice.name} ({choice.precision}, batch of {len(got)}) differ by "
            f"{difference:.3g}, more than the tolerance {most:.3g}: not the same weights, or an engine that errs here"
        )
    return difference
