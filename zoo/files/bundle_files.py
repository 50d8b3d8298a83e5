"""The files of a bundle, and the hashes that hold them together."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from safetensors import SafetensorError

from zoo.errors import BundleError
from zoo.files.durable import new_directory

WEIGHTS: Final = "model.safetensors"
CARD: Final = "card.json"
GOLDEN: Final = "golden.safetensors"
ONNX: Final = "model.onnx"
_INSIDE = ("bundle", "latest/bundle", "checkpoints/*")  # of a training run's folder


def digest(file: Path) -> str:
    """Return a file's SHA-256."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Give a folder to write what `path` is to be: it gets that name if the block ends well, and is gone if not.

    Raises:
        BundleError: As the block does, with `path` for the folder's name; or if the disk refuses.
    """
    aside = path
    try:
        with new_directory(path) as aside:
            yield aside
    except BundleError as error:
        raise type(error)(str(error).replace(str(aside), str(path))) from error
    except (SafetensorError, OSError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BundleError(f"{path}: cannot be written ({reason}); nothing is left there") from error


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
    hashes = read_digests(recorded)
    for name in (WEIGHTS, CARD, *([ONNX] if ONNX in hashes else [])):
        if not (path / name).is_file():
            raise BundleError(f"{path / name}: missing")
        if digest(path / name) != hashes.get(name):
            raise BundleError(f"{path / name}: damaged, it is not the file that was written with the bundle")


def read_digests(recorded: str) -> dict[str, object]:
    """Return the recorded hashes by file; empty if they are unreadable, so that every file counts as damaged."""
    try:
        hashes = json.loads(recorded)
    except (ValueError, RecursionError):
        return {}
    return hashes if isinstance(hashes, dict) else {}
