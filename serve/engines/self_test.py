"""The proof, before an engine may answer: the golden example that is stored with the bundle."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import load_file

from zoo.card import ModelCard
from zoo.errors import BundleError
from zoo.files.bundle_files import GOLDEN

if TYPE_CHECKING:
    from serve.engines.engine import Engine

_TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}


def check_engine(engine: "Engine", bundle: Path, card: ModelCard) -> float:
    """Ask `engine` the golden input of the bundle; return the largest difference of a logit.

    Raises:
        BundleError: If it is beyond the tolerance of the engine's precision, or not finite.
    """
    del card
    golden = load_file(bundle / GOLDEN)
    got, wanted = engine.run(golden["input"]), golden["logits"]
    difference = float(np.abs(got - wanted).max())
    tolerance = _TOLERANCE[engine.choice.precision] * max(1.0, float(np.abs(wanted).max()))
    if not difference <= tolerance:
        raise BundleError(
            f"{bundle / GOLDEN}: the engine's logits differ by {difference:.3g}, more than {tolerance:.3g}"
        )
    return difference
