"""The engine that will serve the trained model: chosen, proven and scored as the bundle is written."""

import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from train.config import PublishConfig
from train.errors import PublishError
from train.loaders import Batches, build_val_loader
from train.publish import SCORE, write_bundle
from train.run import Run
from zoo.card import EngineChoice, ModelCard, read_card
from zoo.errors import UnfitEngineError
from zoo.files.bundle_files import CARD

if TYPE_CHECKING:
    from serve.package import Engine

logger = logging.getLogger(__name__)

SERVED = "serve/top1"


@dataclass(frozen=True)
class Equipped:
    """A bundle with the engine that its card names.

    Attributes:
        card: Its card, with `serve/top1` among the metrics.
        difference: The largest difference of a logit between the engine and torch in float32.
        reason: Why it is not the engine that `auto` takes first; "" if it is.
    """

    card: ModelCard
    difference: float
    reason: str = ""

    def __str__(self) -> str:
        engine, served, scored = self.card.engine, self.card.metrics[SERVED], self.card.metrics[SCORE]
        top1 = f"{served:.2%} as evaluated" if served == scored else f"{served:.2%} by it, {scored:.2%} as evaluated"
        why = f" ({self.reason})" if self.reason else ""
        return f"{engine.name} {engine.precision}{why}, logits within {self.difference:.1e} of torch's; top-1 {top1}"


def list_choices(config: PublishConfig) -> list[EngineChoice]:
    """Return the engines to try, the wanted one first."""
    if config.engine != "auto":
        return [EngineChoice(name=config.engine, precision=config.precision)]
    eager = EngineChoice(precision=config.precision)
    return [eager] if config.precision == "bf16" else [EngineChoice(name="onnx"), eager]


def write_equipped(run: Run, model: nn.Module, card: ModelCard, bundle: Path) -> Equipped:
    """Write the bundle, on the main process, with the first engine of `list_choices` that computes what torch does.

    The validation images go through that engine once, on this machine alone.

    Args:
        run: The training.
        model: The trained model.
        card: Its card, but for the engine.
        bundle: Where to; what an earlier end of this very run has left there is replaced.

    Raises:
        PublishError: If the disk refuses; or if an engine that was asked for by name cannot serve the model, which is
            then kept as a bundle with the engine eager.
    """
    from serve.package import proving

    if bundle.exists():
        shutil.rmtree(bundle)
    workers = run.val_loader.loader.num_workers
    loader = build_val_loader(run.data, run.config.evaluate, num_workers=workers, rank=0, world_size=1)
    differences: list[float] = []

    def measure(engine: "Engine", difference: float) -> Mapping[str, float]:
        logger.info("scoring %d validation images by engine %s", len(run.data.val), engine.choice.name)
        differences.append(difference)
        return {SERVED: score_engine(engine, loader)}

    choices, reasons = list_choices(run.config.publish), []
    for choice in choices:
        try:
            write_bundle(model, card.model_copy(update={"engine": choice}), bundle, prove=proving(measure))
        except UnfitEngineError as error:
            reasons.append(f"not {choice.name}: {error}")
        else:
            return Equipped(read_card(bundle / CARD), differences[-1], "; ".join(reasons))
    write_bundle(model, card, bundle)
    raise PublishError(
        f"{'; '.join(reasons)}. The trained model is kept in {bundle}, for the engine eager: publish it by "
        "--resume auto --publish.engine eager"
    )


def score_engine(engine: "Engine", loader: Batches) -> float:
    """Return the part of the images in 0-1 whose first class an engine finds."""
    right = total = 0
    for images, labels in loader:
        right += int((engine.run(images.numpy()).argmax(1) == labels.numpy()).sum())
        total += len(labels)
    return right / total
