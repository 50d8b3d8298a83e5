"""What is answered when something goes wrong: a mistake by its type, a fault of ours without a word about it.

Handlers are coroutines: others are run in a thread each, which costs more than the answer.
"""

from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from serve.errors import STATUSES, KeyRefusedError, RetryError
from serve.protocol.error_reply import build_error_reply

_REALM = 'Bearer realm="attention-zoo"'


def answer_mistake(scope: Scope, error: Exception) -> JSONResponse:
    """Answer what `serve.errors.STATUSES` lists, by the nearest of its types."""
    status, code = next(STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES)
    headers = {}
    if isinstance(error, RetryError):
        headers["retry-after"] = str(error.retry_after_s)
    if isinstance(error, KeyRefusedError):
        headers["www-authenticate"] = _REALM
    return build_error_reply(scope, status, code, str(error), headers)


def answer_fault(scope: Scope) -> JSONResponse:
    """Answer for our own fault; what it was stands in the log alone."""
    message = "the server failed at this request; see its log"
    return build_error_reply(scope, HTTPStatus.INTERNAL_SERVER_ERROR, "internal_server_error", message)


def answer_going(scope: Scope) -> JSONResponse:
    """Answer a request that is cut since the server goes down."""
    message, headers = "the server is going down; try again", {"retry-after": "1"}
    return build_error_reply(scope, HTTPStatus.SERVICE_UNAVAILABLE, "shutting_down", message, headers)


async def handle_mistake(request: Request, error: Exception) -> Response:
    """Handle an exception of `serve.errors.STATUSES` for FastAPI."""
    return answer_mistake(request.scope, error)


async def handle_http(request: Request, error: Exception) -> Response:
    """Handle what the router raises: no such path, no such method."""
    assert isinstance(error, HTTPException)
    phrase = HTTPStatus(error.status_code).phrase
    headers = dict(error.headers) if error.headers else None
    code = phrase.lower().replace(" ", "_")
    return build_error_reply(request.scope, error.status_code, code, f"{phrase} here", headers)


async def handle_gone(request: Request, _gone: Exception) -> Response:
    """Handle a client that left before its request was whole; nobody reads the answer."""
    return build_error_reply(request.scope, HTTPStatus.BAD_REQUEST, "client_left", "the client left")
