"""Liveness, readiness, what is served, and metrics."""

from importlib.metadata import version

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from serve.models.served import ServedModel, Shelf
from serve.operations.metrics import Metrics
from serve.routes.invocations import name_headers

_PROBE = ["GET", "HEAD"]


def build_router(shelf: Shelf, metrics: Metrics) -> APIRouter:
    """Build the routes that answer for the models on `shelf`."""
    router = APIRouter()

    @router.api_route("/ping", methods=_PROBE)
    @router.api_route("/health", methods=_PROBE)
    async def check_alive() -> Response:
        return JSONResponse({"status": "ok"})

    @router.api_route("/ready", methods=_PROBE)
    async def check_ready() -> Response:
        return JSONResponse({"status": "ready"}, headers=name_headers(shelf.find()))

    @router.get("/version")
    async def describe() -> Response:
        models = [_describe(shelf.find(name)) for name in shelf.names]
        answer = {"attention_zoo": version("attention-zoo"), "model": models[0], "models": models}
        return JSONResponse(answer, headers=name_headers(shelf.find()))

    @router.get("/metrics")
    async def show_metrics() -> Response:
        return Response(metrics.render(), media_type="text/plain; version=1.0.0; charset=utf-8")

    return router


def _describe(served: ServedModel) -> dict[str, object]:
    predictor = served.predictor
    card = predictor.card
    return {
        "name": predictor.name,
        "version": predictor.version,
        "backbone": card.backbone,
        "attention": card.attention,
        "num_classes": len(card.class_names),
        "engine": predictor.engine.choice.model_dump(),
        "device": predictor.engine.device,
        "run_id": card.lineage.run_id,
    }
