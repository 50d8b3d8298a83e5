"""The application: routes over the shelf of models, and every error as one JSON object."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from serve.batching.batcher import BatchLimits
from serve.errors import STATUSES, RetryError
from serve.models.served import ServedModel, Shelf
from serve.operations.metrics import Metrics
from serve.pipeline import Pipeline
from serve.predictor import Predictor
from serve.routes import invocations, probes, v2
from serve.settings import Settings

logger = logging.getLogger(__name__)


def create_app(settings: Settings, *predictors: Predictor) -> FastAPI:
    """Build the application that answers for `predictors`, the first by default."""
    metrics = Metrics()
    limits = BatchLimits(settings.max_batch, settings.batch_wait_ms / 1000, settings.max_queue)
    shelf = Shelf([ServedModel(predictor, limits, metrics) for predictor in predictors])

    pipeline = Pipeline(settings, metrics)

    @asynccontextmanager
    async def live(_app: FastAPI) -> AsyncIterator[None]:
        yield
        await shelf.close()
        pipeline.close()

    app = FastAPI(title="attention-zoo", docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=live)
    app.include_router(invocations.build_router(shelf, pipeline))
    app.include_router(v2.build_router(shelf, pipeline))
    app.include_router(probes.build_router(shelf, metrics))
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
    headers = {"retry-after": str(error.retry_after_s)} if isinstance(error, RetryError) else None
    return _error(status, code, str(error), headers)


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
