"""Open Inference Protocol v2 with Triton's binary tensor data: from a body to a payload, and back to a reply."""

import json
import math
import struct
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from python_multipart.multipart import parse_options_header
from starlette.requests import Request
from starlette.responses import Response

from serve.errors import MalformedError, MediaTypeError, TensorError
from serve.protocol.encoding import decode_cell
from serve.protocol.payload import Payload, check_count, name_image
from serve.protocol.schemas_v2 import OUTPUTS, InferInput, InferRequest
from serve.protocol.scoring import describe
from serve.protocol.strict_json import JsonLimits, parse_strict_json
from serve.protocol.tensors import to_tensor
from serve.settings import Settings
from zoo.errors import ImageError

HEADER_LENGTH = "inference-header-content-length"


@dataclass(frozen=True)
class InferPayload(Payload):
    """What an infer request asks, and how it wants its answer.

    Attributes:
        outputs: Names of the outputs in the order of the answer, each with whether it goes as binary data.
        id: The client's own name for the request.
    """

    outputs: tuple[tuple[str, bool], ...] = ()
    id: str | None = None


def parse_infer(request: Request, body: bytes, settings: Settings) -> InferPayload:
    """Read an infer request.

    Raises:
        MediaTypeError: If it is sent as something else than JSON or binary data.
        MalformedError: If it is not of the protocol's form.
        ImageError: If an image's text is not base64.
        TensorError: If the numbers are no FP32 tensor of the shape given.
        TooLargeError: If there are more images than allowed.
    """
    kind, _ = parse_options_header(request.headers.get("content-type"))
    if kind not in (b"", b"application/json", b"application/octet-stream"):
        raise MediaTypeError("the content type is not read here; send application/json or application/octet-stream")
    text, binary = _split(body, request.headers.get(HEADER_LENGTH))
    parsed = parse_strict_json(text, JsonLimits.for_images(settings.max_json_depth, settings.max_images))
    try:
        asked = InferRequest.model_validate(parsed)
    except ValidationError as error:
        raise MalformedError(describe(error, _FIELDS, "a JSON object with inputs")) from error
    (tensor,) = asked.inputs
    size = tensor.binary_data_size
    if len(binary) != (size or 0):
        raise MalformedError("inputs.0.parameters.binary_data_size: not the number of bytes after the JSON")
    check_count(tensor.shape[0], settings.max_images)
    images: list[bytes] | NDArray[np.float32]
    if tensor.datatype == "FP32":
        images = _read_numbers(tensor, None if size is None else binary)
    else:
        images = _read_files(tensor, None if size is None else binary)
    return InferPayload(images, outputs=asked.wanted(), id=asked.id)


def build_infer_reply(
    asked: InferPayload, probabilities: NDArray[np.float32], labels: list[str], model: tuple[str, str]
) -> Response:
    """Build the answer to an infer request.

    Args:
        asked: What was asked.
        probabilities: (B, K).
        labels: The most probable class of each image.
        model: Name and version of the model.
    """
    outputs, binary = [], []
    for name, is_binary in asked.outputs:
        shape = list(probabilities.shape) if name == "probabilities" else [len(labels)]
        output: dict[str, object] = {"name": name, "datatype": OUTPUTS[name], "shape": shape}
        if is_binary:
            data = probabilities.astype("<f4").tobytes() if name == "probabilities" else _pack(labels)
            output["parameters"] = {"binary_data_size": len(data)}
            binary.append(data)
        else:
            output["data"] = probabilities.ravel().tolist() if name == "probabilities" else labels
        outputs.append(output)
    reply: dict[str, object] = {"model_name": model[0], "model_version": model[1], "outputs": outputs}
    if asked.id is not None:
        reply["id"] = asked.id
    text = json.dumps(reply, ensure_ascii=False, allow_nan=False).encode()
    if not binary:
        return Response(text, media_type="application/json")
    headers = {HEADER_LENGTH: str(len(text))}
    return Response(b"".join([text, *binary]), media_type="application/octet-stream", headers=headers)


def _split(body: bytes, length: str | None) -> tuple[bytes, bytes]:
    """Split a body in its JSON and the binary data after it."""
    if length is None:
        return body, b""
    if not (length.isascii() and length.isdigit() and len(length) < 20 and int(length) <= len(body)):
        raise MalformedError(f"{HEADER_LENGTH}: wanted the number of bytes of the JSON, at most those of the body")
    return body[: int(length)], body[int(length) :]


def _read_numbers(tensor: InferInput, binary: bytes | None) -> NDArray[np.float32]:
    """Read FP32 data: binary, or as numbers, flat or nested."""
    shape = tuple(tensor.shape)
    if binary is not None:
        if len(binary) != 4 * math.prod(shape):
            raise TensorError("inputs.0: the binary data has not the size of an FP32 tensor of that shape")
        return np.frombuffer(binary, "<f4").reshape(shape).astype(np.float32)  # a copy: the body cannot be written
    numbers = to_tensor(tensor.data or [])
    if numbers.shape != shape and numbers.shape != (math.prod(shape),):
        raise TensorError("inputs.0: the data has not the given shape")
    return numbers.reshape(shape)


def _read_files(tensor: InferInput, binary: bytes | None) -> list[bytes]:
    """Read BYTES data: files with their lengths before them, or base64 text in JSON."""
    count = tensor.shape[0]
    if tensor.shape not in ([count], [count, 1]):
        raise TensorError("inputs.0: BYTES have the shape (B) or (B, 1): one image is one element")
    cells = _unpack(binary, count) if binary is not None else _flatten(tensor.data or [])
    if len(cells) != count:
        raise TensorError("inputs.0: the data has not the given shape")
    files = []
    for i, cell in enumerate(cells):
        try:
            files.append(decode_cell(cell))
        except ImageError as error:
            raise name_image(error, i, count) from error
    return files


def _flatten(data: list[object]) -> list[object]:
    if data and all(isinstance(cell, list) and len(cell) == 1 for cell in data):
        return [cast(list[object], cell)[0] for cell in data]
    return data


def _pack(texts: list[str]) -> bytes:
    """Write BYTES elements: each its length in 4 bytes, little-endian, and then itself."""
    encoded = [text.encode() for text in texts]
    return b"".join(struct.pack("<I", len(data)) + data for data in encoded)


def _unpack(binary: bytes, count: int) -> list[object]:
    """Read `count` elements of what `_pack` writes, and one more where there are more."""
    cells: list[object] = []
    start = 0
    while start < len(binary) and len(cells) <= count:
        end = start + 4
        if end <= len(binary):
            end += struct.unpack_from("<I", binary, start)[0]
        if end > len(binary):
            raise TensorError("inputs.0: the binary data ends within an element")
        cells.append(binary[start + 4 : end])
        start = end
    return cells


_FIELDS = {*InferRequest.model_fields, *InferInput.model_fields, "binary_data_size", "binary_data"}
