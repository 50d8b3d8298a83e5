"""JSON that is nothing else: what is deep, ambiguous or huge is refused, most of it before any object is built."""

import json
import re
from dataclasses import dataclass

import numpy as np

from serve.errors import MalformedError, TooLargeError

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""A string, or the rest of the body where one does not end: so every byte is looked at once."""
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class JsonLimits:
    """What one JSON body may hold. Objects are the dear part: one costs 20 times the memory of its text.

    Attributes:
        max_depth: Deepest nesting of objects and arrays.
        max_objects: Most objects.
        max_arrays: Most arrays.
        max_strings: Most strings, keys included.
    """

    max_depth: int
    max_objects: int
    max_arrays: int
    max_strings: int

    @classmethod
    def for_images(cls, max_depth: int, max_images: int) -> "JsonLimits":
        """Leave room for `max_images` in any of the protocols' forms.

        An image is at most an object, a key and a name in an index; a tensor is an array for each of its rows. What
        is left over is for the request around the images.
        """
        return cls(max_depth, max_images + 64, 4096 * max_images + 64, 4 * max_images + 256)


def parse_strict_json(body: bytes, limits: JsonLimits) -> object:
    """Parse JSON in UTF-8 without a byte order mark.

    Raises:
        MalformedError: If it is not JSON; if it is nested too deeply; if an object has a key twice; if a number is
            NaN, infinite or has thousands of digits.
        TooLargeError: If it has more parts than `limits`.
    """
    if body.startswith(_BYTE_ORDER_MARK):
        raise MalformedError("the body starts with a byte order mark; JSON has none")
    _check_structure(body, limits)
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise MalformedError("the body is not UTF-8") from error
    except RecursionError as error:
        raise MalformedError("the JSON is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise MalformedError(f"the body is not JSON (line {error.lineno}, column {error.colno})") from error
    except MalformedError:
        raise
    except ValueError as error:  # a number with thousands of digits
        raise MalformedError("the body is not JSON that can be read here") from error


def _check_structure(body: bytes, limits: JsonLimits) -> None:
    """Count what the text would become. Base64 has no bracket, so a request of images is counted in no time."""
    objects, arrays, quotes = body.count(b"{"), body.count(b"["), body.count(b'"')
    if (
        objects + arrays <= limits.max_depth
        and objects <= limits.max_objects
        and arrays <= limits.max_arrays
        and quotes <= 2 * limits.max_strings
    ):
        return
    _check_count("strings", (quotes - body.count(b'\\"')) // 2, limits.max_strings)  # there are at least so many
    bare, strings = _STRING.subn(b"", body)  # brackets and quotes inside strings are none
    brackets = np.frombuffer(bare.translate(None, _NO_BRACKETS), np.uint8)
    opens = (brackets == ord("[")) | (brackets == ord("{"))
    depths = np.cumsum(np.where(opens, np.int8(1), np.int8(-1)), dtype=np.int32)
    if depths.size and depths.max() > limits.max_depth:
        raise MalformedError(f"the JSON is nested too deeply: more than {limits.max_depth} levels")
    _check_count("objects", bare.count(b"{"), limits.max_objects)
    _check_count("arrays", bare.count(b"["), limits.max_arrays)
    _check_count("strings", strings, limits.max_strings)


def _check_count(what: str, got: int, limit: int) -> None:
    if got > limit:
        raise TooLargeError(f"the JSON has more than {limit} {what}; send fewer images in one request")


def _refuse_constant(_name: str) -> float:
    raise MalformedError("the JSON holds NaN or Infinity, which JSON has not")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    parsed = dict(pairs)
    if len(parsed) != len(pairs):
        raise MalformedError("the JSON has an object with the same key twice")
    return parsed
