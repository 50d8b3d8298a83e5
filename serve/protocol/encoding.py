"""Images as base64 text, the form in which JSON carries bytes."""

import base64
import binascii

from zoo.errors import ImageError


def decode_base64(text: str) -> bytes:
    """Decode base64 text, line breaks allowed.

    Raises:
        ImageError: If it is not base64.
    """
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        pass  # most texts have no line breaks, and looking for some costs more than decoding
    try:
        return base64.b64decode("".join(text.split()).encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise ImageError("the image is not valid base64 (standard alphabet, no data: prefix)") from error


def decode_cell(cell: object) -> bytes:
    """Return an image's bytes from a table's cell: the bytes themselves, or base64 as text or as bytes.

    No image format of ours is valid base64 all through (each has bytes beyond it in its header), so the two cannot
    be confused.

    Raises:
        ImageError: If the cell is neither.
    """
    if isinstance(cell, bytes):
        try:
            return base64.b64decode(cell, validate=True)
        except binascii.Error:
            return bytes(cell)
    if isinstance(cell, str):
        return decode_base64(cell)
    raise ImageError(f"an image is bytes or base64 text, got {type(cell).__name__}")
