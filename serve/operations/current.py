"""The request that is being answered, for whoever logs or counts: what is known of it so far."""

import re
import secrets
from contextvars import ContextVar
from dataclasses import dataclass

_SANE_ID = re.compile(r"[A-Za-z0-9._\-]{1,64}", re.ASCII)
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}(-.*)?", re.ASCII
)


@dataclass(slots=True)
class CurrentRequest:
    """What the log and the metrics say of a request.

    Attributes:
        request_id: The client's x-request-id where it is sane, else one of ours.
        trace_id: Of the W3C traceparent, 32 hexadecimal digits; empty without one.
        span_id: The caller's span of it, 16 hexadecimal digits; empty without one.
        key: Name of the API key; empty without keys.
        model: Name of the model that answers; empty until it is known.
        version: Its version; empty until it is known.
        images: Number of images asked about; 0 until it is known.
    """

    request_id: str
    trace_id: str = ""
    span_id: str = ""
    key: str = ""
    model: str = ""
    version: str = ""
    images: int = 0


CURRENT: ContextVar[CurrentRequest | None] = ContextVar("current_request", default=None)


def read_request(headers: list[tuple[bytes, bytes]]) -> CurrentRequest:
    """Take request id and trace from a request's headers; what is not of the form is as if it were not there."""
    request_id = traceparent = None
    for name, value in headers:
        if name == b"x-request-id":
            request_id = value.decode("latin-1")
        elif name == b"traceparent":
            traceparent = value.decode("latin-1")
    if request_id is None or not _SANE_ID.fullmatch(request_id):
        request_id = secrets.token_hex(16)
    trace_id, span_id = parse_traceparent(traceparent) if traceparent else ("", "")
    return CurrentRequest(request_id, trace_id, span_id)


def parse_traceparent(text: str) -> tuple[str, str]:
    """Split a W3C traceparent in trace id and span id, both empty if it is not of the form.

    OpenTelemetry's own propagator takes six times as long: it builds a context that nothing here reads.
    """
    found = _TRACEPARENT.fullmatch(text.strip())
    if not found or (text.startswith("00") and found[3]):  # version 00 ends after the flags
        return "", ""
    return found[1], found[2]


def note_model(name: str, version: str, images: int = 0) -> None:
    """Let the log and the metrics know which model answers the current request, and for how many images."""
    current = CURRENT.get()
    if current is not None:
        current.model, current.version, current.images = name, version, images
