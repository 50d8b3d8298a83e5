"""The application: routes over a predictor, and every error as one JSON object."""

import logging
from http import HTTPStatus

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from serve.errors import STATUSES
from serve.predictor import Predictor
from serve.routes import build_router
from serve.settings import Settings

logger = logging.getLogger(__name__)


def create_app(settings: Settings, predictor: Predictor) -> FastAPI:
    """Build the application that answers for `predictor`."""
    app = FastAPI(title="attention-zoo", openapi_url=None)  # its request bodies are not described by the routes
    app.include_router(build_router(settings, predictor))
    for kind in STATUSES:
        app.add_exception_handler(kind, _answer_mistake)
    app.add_exception_handler(HTTPException, _answer_http)
    app.add_exception_handler(ClientDisconnect, _answer_gone)
    app.add_exception_handler(Exception, _answer_fault)
    return app


def _error(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": {"code": code, "message": message}}, status, headers)


def _answer_mistake(_request: Request, error: Exception) -> Response:
    status, code = next(STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES)
    return _error(status, code, str(error))


def _answer_http(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    phrase = HTTPStatus(error.status_code).phrase
    headers = dict(error.headers) if error.headers else None
    return _error(error.status_code, phrase.lower().replace(" ", "_"), f"{phrase} here", headers)


def _answer_gone(_request: Request, _gone: Exception) -> Response:
    return Response(status_code=HTTPStatus.BAD_REQUEST)  # nobody is there to read it


def _answer_fault(_request: Request, error: Exception) -> Response:
    logger.error("a request failed by our own fault: %s", type(error).__name__)  # the server logs the traceback
    return _error(
        HTTPStatus.INTERNAL_SERVER_ERROR, "internal_server_error", "the server failed at this request; see its log"
    )
