"""Which files to ask about, and which key to ask with."""

from collections.abc import Sequence
from pathlib import Path

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
"""What is taken for an image in a folder, in either case; a file that is named itself is asked about in any case."""


def expand(paths: Sequence[Path]) -> list[Path]:
    """Return the files among `paths` and, sorted, the images anywhere below the folders among them.

    Raises:
        ValueError: If one is not there, or is a folder without images.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += _find_images(path)
        elif path.exists():
            files.append(path)
        else:
            raise ValueError(f"{path}: no such file or folder")
    return files


def _find_images(folder: Path) -> list[Path]:
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not found:
        raise ValueError(f"{folder}: no image in this folder (wanted is a name in {', '.join(sorted(SUFFIXES))})")
    return found


def read_key(path: Path) -> str:
    """Return the first API key in a file of the form that the endpoint reads: KEY or NAME:KEY on a line.

    Raises:
        ValueError: If the file cannot be read, or has no key that fits in a header; the key is never in the message.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ValueError(f"{path}: the API key cannot be read: {reason}") from error
    keys = [line.rpartition(":")[2] for line in map(str.strip, lines) if line and not line.startswith("#")]
    if not keys or not keys[0]:
        raise ValueError(f"{path}: no API key in this file")
    if not (keys[0].isascii() and keys[0].isprintable() and " " not in keys[0]):
        raise ValueError(f"{path}: an API key is visible ASCII without spaces")
    return keys[0]
