"""MLflow's scoring protocol: from a body and its content type to a payload. Nothing of the input is ever echoed."""

from collections.abc import Iterable

from pydantic import ValidationError
from python_multipart.multipart import parse_options_header
from starlette.requests import Request

from serve.errors import MalformedError, MediaTypeError
from serve.protocol.encoding import decode_cell
from serve.protocol.forms import read_files
from serve.protocol.payload import Payload, check_count, name_image
from serve.protocol.schemas import DEFAULT_TOP_K, MAX_TOP_K, Invocation
from serve.protocol.strict_json import JsonLimits, parse_strict_json
from serve.protocol.tensors import to_tensor
from serve.settings import Settings
from zoo.errors import ImageError

COLUMN = "image"
_MEDIA_TYPES = "application/json, image/*, application/octet-stream, multipart/form-data"


def parse_scoring(request: Request, body: bytes, settings: Settings) -> Payload:
    """Read a request of the scoring protocol by its content type.

    Raises:
        MediaTypeError: If nothing here reads that type.
        MalformedError: If the body is not of that type, or not of the protocol's form.
        ImageError: If an image's text is not base64.
        TensorError: If numbers form no tensor.
        TooLargeError: If there are more images than allowed.
    """
    top_k = read_top_k(request)
    content_type = request.headers.get("content-type", "")
    kind, options = parse_options_header(content_type)
    if not kind:
        raise MediaTypeError(f"the request has no content type; send one of {_MEDIA_TYPES}")
    if kind == b"application/json":
        if options.get(b"charset", b"utf-8").lower() not in (b"utf-8", b"utf8"):
            raise MediaTypeError("JSON is read as UTF-8 only")
        return parse_json(body, settings, top_k)
    if kind == b"multipart/form-data":
        files = read_files(options.get(b"boundary", b""), body, settings.max_images)
    elif kind.startswith(b"image/") or kind == b"application/octet-stream":
        files = [body]
    else:
        raise MediaTypeError(f"the content type is not read here; send one of {_MEDIA_TYPES}")
    check_count(len(files), settings.max_images)
    return Payload(files, top_k or DEFAULT_TOP_K)


def read_top_k(request: Request) -> int | None:
    """Read `?top_k=3`, the way to ask for it where the body is an image.

    Raises:
        MalformedError: If it is no count, comes twice, or stands beside something unknown.
    """
    if not request.scope["query_string"]:
        return None
    query = request.query_params.multi_items()
    if [name for name, _ in query] != ["top_k"]:
        raise MalformedError("the query has something else than top_k, once")
    text = query[0][1]
    if not (text.isascii() and text.isdigit() and len(text) < 20 and 1 <= int(text) <= MAX_TOP_K):
        raise MalformedError(f"top_k in the query: wanted a whole number from 1 to {MAX_TOP_K}")
    return int(text)


def parse_json(body: bytes, settings: Settings, top_k: int | None = None) -> Payload:
    """Read a JSON body of the scoring protocol; raises as `parse_scoring`.

    Args:
        body: The JSON.
        settings: The limits.
        top_k: What the query says of it, for a body that says nothing.
    """
    parsed = parse_strict_json(body, JsonLimits.for_images(settings.max_json_depth, settings.max_images))
    try:
        invocation = Invocation.model_validate(parsed)
    except ValidationError as error:
        raise MalformedError(describe(error, _FIELDS, _FORM)) from error
    cells = _cells(invocation)
    check_count(len(cells), settings.max_images)
    if invocation.params is not None:
        if top_k is not None:
            raise MalformedError("top_k stands in the query and params in the body; give one of them")
        top_k = invocation.params.top_k
    if all(isinstance(cell, list) for cell in cells) and (invocation.inputs or invocation.instances):
        return Payload(to_tensor(cells), top_k or DEFAULT_TOP_K)
    return Payload([_decode(i, cells) for i in range(len(cells))], top_k or DEFAULT_TOP_K)


def describe(error: ValidationError, fields: set[str], form: str) -> str:
    """Say the first fault of a request in one line, naming only fields that the protocol has.

    Args:
        error: What pydantic found.
        fields: The protocol's fields.
        form: What a request is, for one that is something else.
    """
    first = error.errors(include_url=False, include_input=False)[0]
    if not first["loc"] and first["type"] == "model_type":
        return f"body: wanted {form}"
    if first["type"] == "extra_forbidden":
        where, what = first["loc"][:-1], "unknown field; the protocol has no such"
    else:
        where, what = first["loc"], first["msg"].removeprefix("Value error, ")
    known = [str(part) for part in where if isinstance(part, int) or part in fields]
    return f"{'.'.join(known) or 'body'}: {what}"


def _decode(index: int, cells: list[object]) -> bytes:
    try:
        return decode_cell(cells[index])
    except ImageError as error:
        raise name_image(error, index, len(cells)) from error


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


_FIELDS = {*Invocation.model_fields, "columns", "data", "index", "top_k"}
_FORM = "a JSON object with one of dataframe_split, dataframe_records, inputs, instances"
