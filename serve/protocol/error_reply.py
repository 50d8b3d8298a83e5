"""Every error as one JSON object, in the form of the protocol that the request speaks."""

from starlette.responses import JSONResponse
from starlette.types import Scope

UNREAD = "serve.body_unread"
"""Key of a request's scope while its body is not read to the end."""


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
