"""What OpenAPI says of the routes that read their body by hand: content types, replies, errors."""

from typing import Any

from pydantic import BaseModel

from serve.errors import STATUSES
from serve.protocol.schemas import ErrorReply, Invocation, Reply
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
_IMAGE = {"schema": {"type": "string", "format": "binary", "minLength": 1, "description": "The bytes of one image."}}


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


def inline_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Write a model's JSON schema with nothing referred to, for a body that FastAPI does not know of."""
    schema = model.model_json_schema()
    parts = schema.pop("$defs", {})

    def resolve(node: Any) -> Any:
        if isinstance(node, list):
            return [resolve(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            rest = {key: value for key, value in node.items() if key != "$ref"}
            return {**resolve(parts[node["$ref"].rpartition("/")[2]]), **rest}
        return {key: resolve(value) for key, value in node.items()}

    resolved: dict[str, Any] = resolve(schema)
    return resolved


def _top_k() -> dict[str, Any]:
    schema = inline_schema(Invocation)["properties"]["params"]["anyOf"][0]["properties"]["top_k"]
    return {"name": "top_k", "in": "query", "required": False, "schema": schema, "description": schema["description"]}


def _timeout() -> dict[str, Any]:
    return {
        "name": "x-request-timeout-ms",
        "in": "header",
        "required": False,
        "schema": {"type": "integer", "minimum": 1, "maximum": 10**18},
        "description": "Milliseconds after which the answer is 504; never more than the server's own limit.",
    }


_FILES = {
    "type": "object",
    "title": "ImageFiles",
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

SCORING_BODY: dict[str, Any] = {
    "parameters": [_top_k(), _timeout()],
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": inline_schema(Invocation)},
            "multipart/form-data": {"schema": _FILES},
            "application/octet-stream": _IMAGE,
            "image/*": _IMAGE,
        },
    },
}

INFER_BODY: dict[str, Any] = {
    "parameters": [
        _timeout(),
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
            "application/json": {"schema": inline_schema(InferRequest)},
            "application/octet-stream": {
                "schema": {"type": "string", "format": "binary", "description": "The JSON, then the binary data."}
            },
        },
    },
}

assert {status for status, _ in STATUSES.values()} <= set(_DESCRIPTIONS)
