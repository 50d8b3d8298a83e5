"""Directories that are whole or not there: written aside, flushed to disk, renamed into place."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Give a directory to write into that becomes `path` when the block ends without an error.

    A process that dies meanwhile leaves a hidden `.NAME.partial-PID` beside it, never half a `path`. Parents are made.

    Args:
        path: The directory to be; it must not exist yet.

    Yields:
        The directory beside it. Whatever stands in it is flushed to disk before the rename.

    Raises:
        FileExistsError: If `path` exists.
    """
    if path.exists():
        raise FileExistsError(f"{path}: exists already")
    aside = path.with_name(f".{path.name}.partial-{os.getpid()}")
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


def flush(path: Path) -> None:
    """Wait until a file's bytes, or a directory's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
