"""A bundle's golden example and hashes, read and written without torch: what proves that whoever loads it has it whole.

`golden.safetensors` holds one input (1, 3, height, width) and its logits (1, K); in its metadata, the SHA-256 of the
bundle's other files.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from zoo.card import ModelCard, read_card
from zoo.errors import BundleError
from zoo.files.bundle_files import CARD, GOLDEN, ONNX, WEIGHTS, check_digests, digest, hint_inside
from zoo.files.opening import read_file

GOLDEN_TOLERANCE: Final = 1e-3
"""Largest difference of golden logits, relative to the largest of them (at least 1).

Wide enough for another processor, thread count or TensorFloat-32, which move float32 logits by 1e-6 to 1e-4; a
wrong weight or a missing tie moves them by far more.
"""


@dataclass(frozen=True)
class Golden:
    """What a bundle's model was asked when it was saved, and what it answered.

    Attributes:
        image: The input, (1, 3, height, width).
        logits: The logits, (1, K).
        recorded: The hashes of the bundle's other files as JSON, for `check_digests`.
    """

    image: NDArray[np.float32]
    logits: NDArray[np.float32]
    recorded: str


def read_bundle_card(path: Path) -> ModelCard:
    """Read the card of the bundle in the directory `path`.

    Raises:
        BundleError: If there is none, in one line that says where one may be; or if it is no card.
    """
    if not path.is_dir():
        raise BundleError(f"{path}: no bundle here, a directory with {CARD} and {WEIGHTS} is wanted")
    if not os.path.lexists(path / CARD):
        raise BundleError(f"{path}: no {CARD} in it: not a bundle{hint_inside(path)}")
    return read_card(path / CARD)


def read_golden(path: Path, card: ModelCard) -> Golden:
    """Read the golden example of the bundle at `path`.

    Raises:
        BundleError: If it is missing, damaged, or of other shapes than the card wants.
    """
    arrays, metadata = read_file(path / GOLDEN, "numpy")
    wanted = {"input": (1, 3, *card.preprocessing.size), "logits": (1, len(card.class_names))}
    for name, shape in wanted.items():
        got = tuple(arrays[name].shape) if name in arrays else "nothing"
        if got != shape:
            what = f"{len(card.class_names)} class_names" if name == "logits" else "preprocessing.size"
            raise BundleError(f"{path / GOLDEN}: {name}: got {got}, wanted {shape} by the card's {what}")
        if arrays[name].dtype != np.float32:
            raise BundleError(f"{path / GOLDEN}: {name}: got {arrays[name].dtype}, wanted float32")
    return Golden(arrays["input"], arrays["logits"], metadata.get("sha256", ""))


def write_golden(path: Path, image: NDArray[np.float32], logits: NDArray[np.float32]) -> None:
    """Write the golden example of the bundle at `path`, whose other files are all written."""
    names = [name for name in (WEIGHTS, CARD, ONNX) if (path / name).exists()]
    recorded = json.dumps({name: digest(path / name) for name in names})  # one key: safetensors shuffles
    save_file({"input": image, "logits": np.ascontiguousarray(logits)}, path / GOLDEN, metadata={"sha256": recorded})
    shutil.copymode(path / CARD, path / GOLDEN)  # safetensors writes for the owner alone, whatever the umask


def check_files(path: Path) -> ModelCard:
    """Check card, golden example and hashes of the bundle at `path`; the weights are hashed, not loaded.

    Raises:
        BundleError: If a file is missing, damaged or does not fit; the message names it.
    """
    card = read_bundle_card(path)
    check_digests(path, read_golden(path, card).recorded)
    return card


def compare_logits(got: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    """Return the largest absolute difference; raise BundleError beyond `GOLDEN_TOLERANCE`, or if it is not finite."""
    difference = float(np.abs(got - wanted).max())
    tolerance = GOLDEN_TOLERANCE * max(1.0, float(np.abs(wanted).max()))
    if not difference <= tolerance:  # a NaN too
        raise BundleError(
            f"the model's logits differ by {difference:.3g} from those it was saved with, more than "
            f"{tolerance:.3g}: these are not the same weights, or not the same model"
        )
    return difference
