"""From a request's body to the model's input: (B, 3, height, width). Nothing of the input is ever echoed."""

import json
import sys
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass
from email.message import Message

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from serve.errors import MalformedError, MediaTypeError, TensorError, TooLargeError
from serve.protocol.encoding import decode_cell
from serve.protocol.schemas import DEFAULT_TOP_K, Invocation
from serve.settings import Settings
from zoo.card import Preprocessing
from zoo.errors import ImageError
from zoo.preprocess import ImageLimits, preprocess

COLUMN = "image"
_MEDIA_TYPES = "application/json, image/*, application/octet-stream, multipart/form-data"


@dataclass(frozen=True)
class Payload:
    """What a request asks: encoded images or a tensor, and how many classes to name for each."""

    images: Sequence[bytes] | NDArray[np.float32]
    top_k: int = DEFAULT_TOP_K


async def read_body(headers: Headers, chunks: AsyncGenerator[bytes, None], limit: int) -> bytes:
    """Collect a body, giving up as soon as it is known to have more than `limit` bytes.

    Raises:
        TooLargeError: If it has.
    """
    too_large = TooLargeError(f"the body has more than {limit} bytes")
    length = headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length[:20]) > limit:
        raise too_large
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > limit:
            raise too_large
    return bytes(body)


async def parse_body(headers: Headers, body: bytes, settings: Settings) -> Payload:
    """Read a body by its content type.

    Raises:
        MediaTypeError: If nothing here reads that type.
        MalformedError: If the body is not of that type, or not of the protocol's form.
        ImageError: If an image's text is not base64.
        TensorError: If numbers form no tensor.
        TooLargeError: If there are more images than allowed.
    """
    message = Message()
    message["content-type"] = headers.get("content-type", "")
    media_type, charset = message.get_content_type(), message.get_param("charset", "utf-8")
    if not headers.get("content-type"):
        raise MediaTypeError(f"the request has no content type; send one of {_MEDIA_TYPES}")
    if media_type == "application/json":
        if str(charset).lower() not in ("utf-8", "utf8"):
            raise MediaTypeError("JSON is read as UTF-8 only")
        payload = parse_json(body)
    elif media_type == "multipart/form-data":
        payload = Payload(await _read_files(headers, body, settings))
    elif media_type.startswith("image/") or media_type == "application/octet-stream":
        payload = Payload([body])
    else:
        raise MediaTypeError(f"the content type is not read here; send one of {_MEDIA_TYPES}")
    if len(payload.images) > settings.max_images:
        raise TooLargeError(f"the request has {len(payload.images)} images, more than {settings.max_images}")
    if len(payload.images) == 0:
        raise MalformedError("the request has no images")
    return payload


def to_images(payload: Payload, preprocessing: Preprocessing, limits: ImageLimits) -> NDArray[np.float32]:
    """Decode and transform every image, or check the tensor.

    Returns:
        The model's input, (B, 3, height, width).

    Raises:
        ImageError: If an image cannot be decoded within the limits; with several, the message counts from 0.
        TensorError: If the tensor has another shape, or is not finite.
    """
    if isinstance(payload.images, np.ndarray):
        wanted = (3, *preprocessing.size)
        if payload.images.shape[1:] != wanted:
            got = ", ".join(map(str, payload.images.shape))
            raise TensorError(f"the tensor has shape ({got}), wanted (B, {', '.join(map(str, wanted))})")
        return payload.images
    return np.stack([_to_image(i, payload, preprocessing, limits) for i in range(len(payload.images))])


def parse_json(body: bytes) -> Payload:
    """Read a JSON body of the scoring protocol; raises as `parse_body`."""
    try:
        parsed = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_unique)
        invocation = Invocation.model_validate(parsed)
    except UnicodeDecodeError as error:
        raise MalformedError("the body is not UTF-8") from error
    except RecursionError as error:
        raise MalformedError("the JSON is nested too deeply") from error
    except ValidationError as error:
        raise MalformedError(_describe(error)) from error
    except json.JSONDecodeError as error:
        raise MalformedError(f"the body is not JSON (line {error.lineno}, column {error.colno})") from error
    except MalformedError:
        raise
    except ValueError as error:  # a number with thousands of digits
        raise MalformedError("the body is not JSON that can be read here") from error
    cells = _cells(invocation)
    top_k = invocation.params.top_k if invocation.params else DEFAULT_TOP_K
    if cells and all(isinstance(cell, list) for cell in cells) and (invocation.inputs or invocation.instances):
        return Payload(_to_tensor(cells), top_k)
    return Payload([decode_cell(cell) for cell in cells], top_k)


def _to_image(i: int, payload: Payload, preprocessing: Preprocessing, limits: ImageLimits) -> NDArray[np.float32]:
    try:
        data = payload.images[i]
        assert isinstance(data, bytes)
        return preprocess(data, preprocessing, limits)
    except ImageError as error:
        if len(payload.images) == 1:
            raise
        raise ImageError(f"image {i}: {error}") from error


def _cells(invocation: Invocation) -> list[object]:
    """List the values of the one column, whichever form they came in."""
    if invocation.dataframe_split is not None:
        if invocation.dataframe_split.columns != [COLUMN]:
            raise MalformedError(f"dataframe_split.columns: wanted [{COLUMN!r}]")
        if any(len(row) != 1 for row in invocation.dataframe_split.data):
            raise MalformedError("dataframe_split.data: every row has one value")
        return [row[0] for row in invocation.dataframe_split.data]
    if invocation.dataframe_records is not None:
        return _values("dataframe_records", invocation.dataframe_records)
    if isinstance(invocation.inputs, dict):
        (column,) = _values("inputs", [invocation.inputs])
        return column if isinstance(column, list) else [column]
    return _values("inputs" if invocation.inputs else "instances", invocation.inputs or invocation.instances or [])


def _values(form: str, records: Iterable[object]) -> list[object]:
    """Take the column out of every record that is an object."""
    values = []
    for record in records:
        if isinstance(record, dict):
            if list(record) != [COLUMN]:
                raise MalformedError(f"{form}: wanted the one field {COLUMN!r}")
            values.append(record[COLUMN])
        else:
            values.append(record)
    return values


def _to_tensor(cells: list[object]) -> NDArray[np.float32]:
    try:
        numbers = np.array(cells)
    except (ValueError, OverflowError) as error:
        raise TensorError("the tensor is ragged, or nested too deeply") from error
    if numbers.dtype.kind not in "fiu":
        raise TensorError("the tensor holds something else than numbers")
    with np.errstate(over="ignore"):
        tensor = numbers.astype(np.float32)
    if not np.isfinite(tensor).all():
        raise TensorError("the tensor holds numbers beyond float32")
    return tensor


class _InMemoryParser(MultiPartParser):
    spool_max_size = sys.maxsize  # the body is in memory already, and the disk may be read-only


async def _read_files(headers: Headers, body: bytes, settings: Settings) -> list[bytes]:
    """Read the files of a multipart form, in order."""

    async def once() -> AsyncGenerator[bytes, None]:
        yield body

    parser = _InMemoryParser(headers, once(), max_files=settings.max_images, max_fields=0)
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError, UnicodeDecodeError) as error:
        if str(error).startswith("Too many files"):
            raise TooLargeError(f"the form has more than {settings.max_images} files") from error
        if str(error).startswith("Too many fields"):
            raise MalformedError("the form has a field that is no file; give every image a file name") from error
        raise MalformedError("the body is not multipart/form-data") from error
    files = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
    contents = [await file.read() for file in files]
    await form.close()
    return contents


def _refuse_constant(_name: str) -> float:
    raise MalformedError("the JSON holds NaN or Infinity, which JSON has not")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    parsed = dict(pairs)
    if len(parsed) != len(pairs):
        raise MalformedError("the JSON has an object with the same key twice")
    return parsed


def _describe(error: ValidationError) -> str:
    """Say the first fault in one line, naming only fields that the protocol has."""
    first = error.errors(include_url=False, include_input=False)[0]
    if not first["loc"] and first["type"] == "model_type":
        return "body: wanted a JSON object with one of dataframe_split, dataframe_records, inputs, instances"
    if first["type"] == "extra_forbidden":
        where, what = first["loc"][:-1], "unknown field; MLflow's scoring protocol has no such"
    else:
        where, what = first["loc"], first["msg"].removeprefix("Value error, ")
    known = [str(part) for part in where if isinstance(part, int) or part in _FIELDS]
    return f"{'.'.join(known) or 'body'}: {what}"


_FIELDS = {*Invocation.model_fields, "columns", "data", "index", "top_k"}
