"""A bundle out of a bundle: the same model for another engine."""

from collections.abc import Mapping
from pathlib import Path

from serve.engines.engine import Engine
from serve.engines.proof import proving
from serve.errors import EngineError
from zoo.card import EngineChoice


def equip(bundle: Path, new: Path, choice: EngineChoice) -> float:
    """Write the bundle at `bundle` to `new` with another engine; return the largest difference of a logit from torch.

    Raises:
        BundleError: If the bundle is damaged, or `new` exists.
        EngineError: If the engine has no such precision.
        UnfitEngineError: If the engine cannot compute the model here, or computes something else.
    """
    from zoo.bundle import check_golden, load_bundle, save_bundle  # torch: not for --help

    if choice.name == "onnx" and choice.precision != "fp32":
        raise EngineError("the engine onnx computes in fp32; give --precision fp32, or --engine eager or compile")
    if new.exists():  # before the work
        raise EngineError(f"{new}: exists already; nothing is overwritten, choose another path")
    model, card = load_bundle(bundle)
    check_golden(model, bundle)
    metrics = {name: value for name, value in card.metrics.items() if not name.startswith("serve/")}  # another engine's
    found: list[float] = []

    def note(_engine: Engine, difference: float) -> Mapping[str, float]:
        found.append(difference)
        return {}

    card = card.model_copy(update={"engine": choice, "metrics": metrics})
    save_bundle(model, card, new, prove=proving(note))
    return found[0]
