"""The application: routes over the shelf of models, and every error as one JSON object."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from serve.errors import STATUSES
from serve.models.keeper import Keeper
from serve.models.load import get_limits
from serve.models.room import RoomCheck
from serve.models.served import ServedModel, Shelf
from serve.models.uris import parse_uris
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

logger = logging.getLogger(__name__)


def log_failure(error: Exception) -> None:
    """Say that a model could not be loaded, where nobody else does."""
    logger.error("a model cannot be loaded, this server will not be ready: %s", error)


def create_app(
    settings: Settings,
    *predictors: Predictor,
    on_ready: Callable[[list[Predictor]], None] = lambda _: None,
    on_failure: Callable[[Exception], None] = log_failure,
) -> FastAPI:
    """Build the application that answers for `predictors`, the first by default.

    Args:
        settings: How to serve, and what: without predictors the models of `model_uri` are loaded while the server
            answers already, with 503 until they are warm, and are followed from then on.
        predictors: What to serve instead, as it is.
        on_ready: Called when every model has answered.
        on_failure: Called if one of them cannot be loaded.

    Raises:
        KeyFileError: If the file of API keys cannot be used.
        LocateError: If `model_uri` is of no form that is known, or names two models alike.
    """
    metrics, draining = Metrics(), Draining()
    uris = [] if predictors else parse_uris(settings.model_uri)
    shelf = Shelf([model.name for model in (predictors or uris)], metrics)
    for predictor in predictors:
        shelf.swap(ServedModel(predictor, get_limits(settings), metrics))
    keeper = Keeper(settings, uris, shelf, metrics)
    pipeline = Pipeline(settings, metrics)

    vitals = Vitals(shelf, draining, settings.hung_after_s)

    @asynccontextmanager
    async def live(_app: FastAPI) -> AsyncIterator[None]:
        keeping = asyncio.create_task(
            keeper.keep(lambda: on_ready([served.predictor for served in shelf.models]), on_failure)
        )
        yield
        keeping.cancel()
        await asyncio.wait([keeping])
        await shelf.close()
        pipeline.close()

    app = FastAPI(title="attention-zoo", docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=live)
    app.openapi = partial(build_openapi, app)  # type: ignore[method-assign]
    app.state.metrics, app.state.draining = metrics, draining  # for the server around it
    app.include_router(invocations.build_router(shelf, pipeline))
    app.include_router(v2.build_router(shelf, pipeline, vitals))
    app.include_router(probes.build_router(shelf, metrics, vitals))
    _add_layers(app, settings, metrics, RoomCheck(shelf))
    return app


def _add_layers(app: FastAPI, settings: Settings, metrics: Metrics, check_room: RoomCheck) -> None:
    """Put the log around the gate around the routes, and say how errors are answered."""
    for kind in STATUSES:
        app.add_exception_handler(kind, answers.handle_mistake)
    app.add_exception_handler(HTTPException, answers.handle_http)
    app.add_exception_handler(ClientDisconnect, answers.handle_gone)
    keys = KeyRing(settings.api_keys_file) if settings.api_keys_file else None
    rates = RateLimiter(settings.rate_limit) if settings.rate_limit else None
    app.add_middleware(Gate, keys, rates, check_room)
    app.add_middleware(AccessLog, metrics, log=settings.access_log)  # the last added is the outermost
