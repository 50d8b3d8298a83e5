"""What an ONNX file may hold before a runtime opens it: standard operators, and all numbers within. No package needed.

A file from elsewhere could name a library's operators, or other files as the place of its weights (`/etc/passwd`). So
its protobuf is walked here: every field that could do so, as often as it stands there. All else the runtime may judge.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from zoo.errors import ExportError

_STANDARD: Final = ("", "ai.onnx")
_DEPTH: Final = 16  # graphs within operators within graphs
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

# Numbers of the fields in onnx.proto: where messages of each kind stand in each other.
_CHILDREN: Final[dict[str, dict[int, str]]] = {
    "model": {7: "graph", 8: "opset", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 9: "opset", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
}
_DOMAINS: Final = {"node": 7, "opset": 1, "function": 10}
_EXTERNAL_DATA, _DATA_LOCATION = 13, 14


def check_onnx(file: Path) -> bytes:
    """Return the content of an ONNX file that holds standard operators and its own numbers alone.

    Raises:
        ExportError: If it holds anything else, or is not ONNX; the message names the file and what was found.
        OSError: If it cannot be read.
    """
    content = file.read_bytes()
    try:
        if not _walk(memoryview(content), "model", _DEPTH):
            raise ValueError("no graph in it")
    except ExportError as error:
        raise ExportError(f"{file}: {error}") from error
    except (ValueError, IndexError) as error:
        raise ExportError(f"{file}: not ONNX, or truncated ({error or 'it ends early'})") from error
    return content


def _walk(message: memoryview, kind: str, depth: int) -> bool:
    """Check a message and all within it; say whether it holds a message of a kind that can."""
    if depth < 0:
        raise ExportError("graphs are nested too deep")
    children, domain, found = _CHILDREN.get(kind, {}), _DOMAINS.get(kind), False
    for number, value in _fields(message):
        if number == domain:
            _check_domain(kind, value)
        elif kind == "tensor" and number in (_EXTERNAL_DATA, _DATA_LOCATION) and value != 0:
            raise ExportError("it keeps weights in another file, which is never read; all must lie in the one file")
        elif number in children:
            if not isinstance(value, memoryview):
                raise ValueError(f"field {number} of a {kind} is a number")
            _walk(value, children[number], depth - 1)
            found = True
    return found


def _check_domain(kind: str, value: "memoryview | int") -> None:
    name = bytes(value).decode("utf-8", "replace") if isinstance(value, memoryview) else str(value)
    if name not in _STANDARD:
        raise ExportError(f"it wants operators of {name!r:.80} ({kind}), and only ONNX's own are run")


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview | int]]:
    """Yield number and value of every field of a protobuf message; fixed-width ones count as 1, they are not read."""
    at = 0
    while at < len(message):
        key, at = _read_varint(message, at)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _read_varint(message, at)
            yield number, value
        elif wire == _BYTES:
            length, at = _read_varint(message, at)
            if at + length > len(message):
                raise ValueError("it ends early")
            yield number, message[at : at + length]
            at += length
        elif wire in (_FIXED64, _FIXED32):
            at += 8 if wire == _FIXED64 else 4
            if at > len(message):
                raise ValueError("it ends early")
            yield number, 1
        else:
            raise ValueError(f"wire type {wire}")


def _read_varint(message: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number of more than 10 bytes")
