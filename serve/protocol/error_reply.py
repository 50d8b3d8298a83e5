"""Every error as one JSON object, in the form of the protocol that the request speaks."""

from starlette.responses import JSONResponse
from starlette.types import Scope

UNREAD = "serve.body_unread"
"""Key of a request's scope while its body is not read to the end."""

_SKIPPED_BYTES = 128 * 1024


def leave_unread(scope: Scope) -> None:
    """Note that a request is answered before its body is read: a small one is skipped, it is here already or nearly.

    A large one, or one whose length is not said, costs the connection.
    """
    length = 0
    for name, value in scope["headers"]:
        if name == b"transfer-encoding" or (name == b"content-length" and not value.isdigit()):
            length = _SKIPPED_BYTES + 1
        elif name == b"content-length":
            length = max(length, int(value[:20]))
    scope[UNREAD] = length > _SKIPPED_BYTES


def build_error_reply(
    scope: Scope, status: int, code: str, message: str, headers: dict[str, str] | None = None
) -> JSONResponse:
    """Build `{"error": {"code", "message"}}`, or `{"error": message}` below /v2, as Open Inference wants it.

    Where the body was not read to its end, the connection is closed after the answer: what is still coming on it
    would have to be read, to find the next request.

    Args:
        scope: The request's scope.
        status: HTTP's status.
        code: The fault's short name.
        message: One line; nothing of the input.
        headers: More headers.
    """
    more = {"connection": "close"} if scope.get(UNREAD) else {}
    error = message if is_v2(scope) else {"code": code, "message": message}
    return JSONResponse({"error": error}, status, {**(headers or {}), **more})


def is_v2(scope: Scope) -> bool:
    """Tell whether a request speaks Open Inference v2."""
    path: str = scope["path"]
    return path == "/v2" or path.startswith("/v2/")
