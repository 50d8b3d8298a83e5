"""The one place where an engine is opened, and proven before it may answer. Imports no torch by itself."""

import os
import sys
from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from typing import Literal

from serve.engines.engine import Engine, EngineOptions
from serve.engines.self_test import check_engine
from serve.errors import EngineError
from zoo.card import EngineChoice, ModelCard

_HOMES = {"eager": "eager", "compile": "compiled", "onnx": "onnx_runtime"}
"""The module below serve.engines that builds each, loaded only when it is wanted: the image for ONNX has no torch."""


def choose_engine(
    card: ModelCard,
    name: Literal["card", "eager", "compile", "onnx"] = "card",
    precision: Literal["card", "fp32", "bf16"] = "card",
) -> EngineChoice:
    """Return the card's choice, with what a setting gives instead of "card"."""
    given = {"name": name, "precision": precision}
    return card.engine.model_copy(update={key: value for key, value in given.items() if value != "card"})


def open_engine(
    bundle: Path, card: ModelCard, *, choice: EngineChoice | None = None, options: EngineOptions | None = None
) -> tuple[Engine, float]:
    """Open the engine that the card chooses, or `choice`, and prove that it answers as the bundle did when saved.

    Returns:
        The engine, and the largest difference of a logit of the golden example.

    Raises:
        BundleError: If the bundle is damaged or answers otherwise.
        EngineError: If that engine is not installed here, or cannot run this bundle.
    """
    wanted = choice or card.engine
    let_threads_sleep(sys.modules)
    try:
        module = import_module(f"serve.engines.{_HOMES[wanted.name]}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("serve", "zoo"):
            raise
        raise EngineError(
            f"the engine {wanted.name} takes the package {error.name}, which is not installed here: install it (the "
            "image serve-torch has it), give the engine onnx by --engine, or make a bundle for that one by "
            "python -m serve.equip"
        ) from error
    engine: Engine = module.build_engine(bundle, card, wanted, options or EngineOptions())
    return engine, check_engine(engine, bundle, card)


def let_threads_sleep(loaded: Collection[str]) -> None:
    """Have torch's idle threads sleep: by default they spin, which on a busy machine doubled an image's CPU time.

    Args:
        loaded: The modules that are loaded; OpenMP reads its environment once, as torch loads.
    """
    if "torch" not in loaded:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
