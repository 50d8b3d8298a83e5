"""Opening safetensors files with every kind of damage named; into torch's tensors or numpy's arrays. Never a pickle."""

import stat
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from zoo.errors import BundleError

_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")  # torch.save's zip, and pickle itself


def read_file(file: Path, framework: Literal["pt", "numpy"]) -> tuple[dict[str, Any], dict[str, str]]:
    """Read all tensors and the metadata of a safetensors file.

    Args:
        file: The file.
        framework: "pt" for torch's tensors, "numpy" for arrays, which needs no torch.

    Raises:
        BundleError: If the file is missing, not a regular file, truncated, or of another format.
    """
    try:
        status = file.stat()
    except FileNotFoundError as error:
        raise BundleError(f"{file}: missing") from error
    except OSError as error:
        raise BundleError(f"{file}: cannot be read ({error.strerror})") from error
    if not stat.S_ISREG(status.st_mode):
        got = "a directory" if stat.S_ISDIR(status.st_mode) else "no regular file"
        raise BundleError(f"{file}: {got}, a safetensors file is wanted")
    try:
        with safe_open(file, framework=framework) as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError, TypeError) as error:  # TypeError: numbers of a kind that numpy has not
        raise BundleError(f"{file}: {_explain(file, error)}; weights of another format are never read") from error


def _explain(file: Path, error: Exception) -> str:
    try:
        with file.open("rb") as opened:
            head = opened.read(4)
    except OSError as unreadable:
        return f"cannot be read ({unreadable.strerror})"
    if not head:
        return "truncated (0 bytes)"
    if head.startswith(_PICKLES):
        return "a pickle, not safetensors"
    return f"truncated, or not safetensors ({error})"
