"""The files of a bundle, and the hashes that hold them together."""

import hashlib
from pathlib import Path
from typing import Final

from zoo.errors import BundleError

WEIGHTS: Final = "model.safetensors"
CARD: Final = "card.json"
GOLDEN: Final = "golden.safetensors"
_INSIDE = ("bundle", "latest/bundle", "checkpoints/*")  # of a training run's folder


def digest(file: Path) -> str:
    """Return a file's SHA-256."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def hint_inside(path: Path) -> str:
    """Phrase, for the end of an error line, which bundle or checkpoint of a training run in `path` may be meant."""
    for pattern in _INSIDE:
        found = sorted(weights.parent for weights in path.glob(f"{pattern}/{WEIGHTS}"))
        if found:
            return f"; did you mean {found[-1]}?"
    return ""


def check_digests(path: Path, recorded: str) -> None:
    """Raise BundleError if a file is not the one that was written: not every flipped bit moves a logit.

    Args:
        path: The bundle.
        recorded: The hashes by file as JSON, from the metadata of the golden example.
    """
    for name in (WEIGHTS, CARD):
        if f'"{name}": "{digest(path / name)}"' not in recorded:
            raise BundleError(f"{path / name}: damaged, it is not the file that was written with the bundle")
