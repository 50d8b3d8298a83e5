"""Directories that are whole or not there: written aside, flushed to disk, renamed into place; removed the same way."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Give a directory to write into that becomes `path` when the block ends without an error.

    A process that dies meanwhile leaves a hidden `.NAME.partial-...` beside it, never half a `path`. Parents are made.

    Args:
        path: The directory to be; it must not exist yet.

    Yields:
        The directory beside it. Whatever stands in it is flushed to disk before the rename.

    Raises:
        FileExistsError: If `path` exists.
    """
    if path.exists():
        raise FileExistsError(f"{path}: exists already")
    aside = _find_aside(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside.mkdir()
    try:
        yield aside
        for file in (*aside.iterdir(), aside):
            flush(file)
        aside.rename(path)  # fails if somebody else has made `path` meanwhile
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    flush(path.parent)


def remove_directory(path: Path) -> None:
    """Remove a directory; a process that dies meanwhile leaves it whole, or hidden, never half of it at `path`."""
    aside = _find_aside(path)
    path.rename(aside)
    shutil.rmtree(aside)


def clear_partial(folder: Path) -> None:
    """Remove from a folder what processes that died have left there, hidden, of directories being written or removed.

    The caller must be the only one who writes into the folder.
    """
    for left in folder.glob(".*.partial-*"):
        shutil.rmtree(left)


def flush(path: Path) -> None:
    """Wait until a file's bytes, or a directory's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _find_aside(path: Path) -> Path:
    """Return a name beside `path` that nobody has: in a container, a process and the one before it have one number."""
    return path.with_name(f".{path.name}.partial-{os.getpid()}-{secrets.token_hex(4)}")
