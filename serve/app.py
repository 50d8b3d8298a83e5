"""The application: routes over the shelf of models, and every error as one JSON object."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from serve.batching.batcher import BatchLimits
from serve.errors import STATUSES
from serve.models.served import ServedModel, Shelf
from serve.operations import answers
from serve.operations.access_log import AccessLog
from serve.operations.draining import Draining
from serve.operations.gate import Gate
from serve.operations.keys import KeyRing
from serve.operations.metrics import Metrics
from serve.operations.rates import RateLimiter
from serve.operations.vitals import Vitals
from serve.pipeline import Pipeline
from serve.predictor import Predictor
from serve.protocol.openapi import build_openapi
from serve.routes import invocations, probes, v2
from serve.settings import Settings


def create_app(settings: Settings, *predictors: Predictor) -> FastAPI:
    """Build the application that answers for `predictors`, the first by default.

    Raises:
        KeyFileError: If the file of API keys cannot be used.
    """
    metrics, draining = Metrics(), Draining()
    limits = BatchLimits(settings.max_batch, settings.batch_wait_ms / 1000, settings.max_queue)
    shelf = Shelf([ServedModel(predictor, limits, metrics) for predictor in predictors])

    pipeline = Pipeline(settings, metrics)

    vitals = Vitals(shelf, draining, settings.hung_after_s)

    @asynccontextmanager
    async def live(_app: FastAPI) -> AsyncIterator[None]:
        yield
        await shelf.close()
        pipeline.close()

    app = FastAPI(title="attention-zoo", docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=live)
    app.openapi = partial(build_openapi, app)  # type: ignore[method-assign]
    app.state.metrics, app.state.draining = metrics, draining  # for the server around it
    app.include_router(invocations.build_router(shelf, pipeline))
    app.include_router(v2.build_router(shelf, pipeline, vitals))
    app.include_router(probes.build_router(shelf, metrics, vitals))
    _add_layers(app, settings, metrics)
    return app


def _add_layers(app: FastAPI, settings: Settings, metrics: Metrics) -> None:
    """Put the log around the gate around the routes, and say how errors are answered."""
    for kind in STATUSES:
        app.add_exception_handler(kind, answers.handle_mistake)
    app.add_exception_handler(HTTPException, answers.handle_http)
    app.add_exception_handler(ClientDisconnect, answers.handle_gone)
    keys = KeyRing(settings.api_keys_file) if settings.api_keys_file else None
    rates = RateLimiter(settings.rate_limit) if settings.rate_limit else None
    app.add_middleware(Gate, keys, rates)
    app.add_middleware(AccessLog, metrics, log=settings.access_log)  # the last added is the outermost
