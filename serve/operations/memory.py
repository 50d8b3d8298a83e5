"""Memory that a few small files can ask for: how much of it at a time, and that it is given back."""

import ctypes
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import Final

LARGE_PIXELS: Final = 4_000_000
"""Images with more are decoded one at a time: 50 million pixels take 1 GB for the moment, in a file of 190 KB."""

_M_MMAP_THRESHOLD = -3
_GIVEN_BACK_BYTES = 8 * 1024 * 1024


class DecodeRoom:
    """Lets images be decoded side by side, large ones one after the other."""

    def __init__(self) -> None:
        self._large = Lock()

    def __call__(self, pixels: int) -> AbstractContextManager[object]:
        """Return what to hold while so many pixels are decoded."""
        return self._large if pixels > LARGE_PIXELS else nullcontext()


def trim_memory() -> None:
    """Give back to the system what is free between what is in use: a model that was let go leaves most of it there."""
    if (malloc_trim := _find("malloc_trim")) is not None:
        malloc_trim(0)


def give_back_memory() -> bool:
    """Have the C library return blocks of 8 MB and more to the system as soon as they are free.

    glibc learns from the first such block to keep all later ones: a server whose clients sent some large images would
    keep gigabytes for good. An allocator of another kind is left as it is.

    Returns:
        Whether the C library took it.
    """
    mallopt = _find("mallopt")
    return mallopt is not None and mallopt(_M_MMAP_THRESHOLD, _GIVEN_BACK_BYTES) == 1


def _find(name: str) -> Callable[..., int] | None:
    """Find a function of glibc; None where the C library is another one."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
