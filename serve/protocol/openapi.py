"""What OpenAPI says of the routes that read their body by hand: content types, replies, errors."""

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from serve.errors import STATUSES
from serve.protocol.schemas import MAX_TOP_K, ErrorReply, Invocation, Reply
from serve.protocol.schemas_v2 import ErrorV2, InferReply, InferRequest

Replies = dict[int | str, dict[str, Any]]

_DESCRIPTIONS = {
    400: "The body is not what its content type says, or not of the protocol's form.",
    401: "No API key, or none that is known.",
    404: "No such model or version here.",
    408: "The body did not arrive in time.",
    413: "More bytes, images or depth than one request may have.",
    415: "A content type or encoding that is not read here.",
    422: "An image that cannot be decoded, or numbers that are no input of the model.",
    429: "More requests than one client may send; Retry-After says when to come back.",
    500: "The server's own fault.",
    503: "No room left, or no model is ready; Retry-After says when to come back.",
    504: "No answer in time.",
}
_TEXT = {"schema": {"type": "string"}}
_NAMES = {
    "x-model-name": {"description": "The model that answered, percent-encoded.", **_TEXT},
    "x-model-version": {"description": "Its version, percent-encoded.", **_TEXT},
}
_COMPONENT = "#/components/schemas/{model}"
_IMAGE = {"schema": {"type": "string", "format": "binary", "minLength": 1, "description": "The bytes of one image."}}

_FILES = {
    "type": "object",
    "required": ["images"],
    "properties": {
        "images": {
            "type": "array",
            "minItems": 1,
            "items": {"type": "string", "format": "binary"},
            "description": "Image files in any field, each with a file name; answered in order.",
        }
    },
}


def scoring_replies() -> Replies:
    """Describe the replies to a request of the scoring protocol."""
    good = {"model": Reply, "description": "The classes of each image.", "headers": _NAMES}
    return {200: good, **error_replies(ErrorReply, *_DESCRIPTIONS)}


def infer_replies() -> Replies:
    """Describe the replies to an infer request."""
    good = {
        "model": InferReply,
        "description": "The outputs; with binary data after the JSON where that was asked for.",
        "headers": _NAMES,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
    return {200: good, **error_replies(ErrorV2, *_DESCRIPTIONS)}


def error_replies(form: type[BaseModel], *statuses: int) -> Replies:
    """Describe errors of one form, by status."""
    replies: Replies = {}
    for status in statuses:
        replies[status] = {"model": form, "description": _DESCRIPTIONS[status]}
        if status in (429, 503):
            whole = {"schema": {"type": "string", "pattern": "^[0-9]+$"}}
            replies[status]["headers"] = {"retry-after": {"description": "Seconds.", **whole}}
    return replies


METRICS_REPLIES: Replies = {
    200: {
        "description": "All series.",
        "content": {"text/plain": _TEXT, "application/openmetrics-text": _TEXT},
    },
    **error_replies(ErrorReply, 401, 429, 500),
}


def build_openapi(app: FastAPI) -> dict[str, Any]:
    """Write the application's OpenAPI document, with the forms of the bodies that FastAPI does not know of."""
    document = get_openapi(title=app.title, version=version("attention-zoo"), routes=app.routes)
    _, definitions = models_json_schema(
        [(Invocation, "validation"), (InferRequest, "validation")], ref_template=_COMPONENT
    )
    schemas = document["components"]["schemas"]
    schemas.update(definitions["$defs"], ImageFiles=_FILES)
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    for operations in document["paths"].values():
        for operation in operations.values():
            if "HTTPValidationError" in str(operation["responses"].get("422")):
                del operation["responses"]["422"]  # FastAPI's own: our parameters are text, so it never occurs
    return document


def _refer(name: str) -> dict[str, Any]:
    return {"schema": {"$ref": _COMPONENT.format(model=name)}}


_TOP_K = {
    "name": "top_k",
    "in": "query",
    "required": False,
    "schema": {"type": "integer", "minimum": 1, "maximum": MAX_TOP_K},
    "description": "How many classes to list for each image, 5 unless said; JSON may say it in params instead.",
}
_TIMEOUT = {
    "name": "x-request-timeout-ms",
    "in": "header",
    "required": False,
    "schema": {"type": "integer", "minimum": 1, "maximum": 10**18},
    "description": "Milliseconds after which the answer is 504; never more than the server's own limit.",
}
SCORING_BODY: dict[str, Any] = {
    "parameters": [_TOP_K, _TIMEOUT],
    "requestBody": {
        "required": True,
        "content": {
            "application/json": _refer("Invocation"),
            "multipart/form-data": _refer("ImageFiles"),
            "application/octet-stream": _IMAGE,
            "image/*": _IMAGE,
        },
    },
}

INFER_BODY: dict[str, Any] = {
    "parameters": [
        _TIMEOUT,
        {
            "name": "inference-header-content-length",
            "in": "header",
            "required": False,
            "schema": {"type": "integer", "minimum": 0},
            "description": "Bytes of the JSON, where binary tensor data follows it.",
        },
    ],
    "requestBody": {
        "required": True,
        "content": {
            "application/json": _refer("InferRequest"),
            "application/octet-stream": {
                "schema": {"type": "string", "format": "binary", "description": "The JSON, then the binary data."}
            },
        },
    },
}

assert {status for status, _ in STATUSES.values()} <= set(_DESCRIPTIONS)
