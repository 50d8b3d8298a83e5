"""Liveness, readiness, what is served, and metrics."""

from importlib.metadata import version

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from serve.models.served import ServedModel, Shelf
from serve.operations.metrics import Metrics
from serve.operations.vitals import Vitals
from serve.protocol.openapi import METRICS_REPLIES, error_replies
from serve.protocol.schemas import ErrorReply
from serve.routes.invocations import name_headers


def build_router(shelf: Shelf, metrics: Metrics, vitals: Vitals) -> APIRouter:
    """Build the routes that tell about the server and the models on `shelf`."""
    router = APIRouter(tags=["operations"])

    @router.head("/ping", include_in_schema=False)
    @router.get("/ping", operation_id="ping", responses=error_replies(ErrorReply, 500, 503))
    @router.head("/health", include_in_schema=False)
    @router.get("/health", operation_id="health", responses=error_replies(ErrorReply, 500, 503))
    async def check_alive() -> Response:
        """Answer 200 while the process is well; 503 means that only a restart helps."""
        vitals.check_alive()
        return JSONResponse({"status": "ok"})

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", operation_id="ready", responses=error_replies(ErrorReply, 500, 503))
    async def check_ready() -> Response:
        """Answer 200 while every model answers; 503 while loading, going down or hanging."""
        vitals.check_ready()
        return JSONResponse({"status": "ready"}, headers=name_headers(shelf.find()))

    @router.get("/version", operation_id="version", responses=error_replies(ErrorReply, 401, 429, 500, 503))
    async def describe() -> Response:
        """Say which models are served, in which version and by which engine."""
        default = shelf.find()
        models = [_describe(served, shelf) for served in shelf.models]
        answer = {"attention_zoo": version("attention-zoo"), "model": models[0], "models": models}
        return JSONResponse(answer, headers=name_headers(default))

    @router.get("/metrics", operation_id="metrics", response_class=Response, responses=METRICS_REPLIES)
    async def show_metrics(request: Request) -> Response:
        """Give all series in Prometheus' text format, or in OpenMetrics' for who accepts it."""
        body, content_type = metrics.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    return router


def _describe(served: ServedModel, shelf: Shelf) -> dict[str, object]:
    predictor = served.predictor
    refused = shelf.refused.get(predictor.name)
    card = predictor.card
    return {
        "name": predictor.name,
        "version": predictor.version,
        "backbone": card.backbone,
        "attention": card.attention,
        "num_classes": len(card.class_names),
        "engine": {**predictor.engine.choice.model_dump(), "golden_difference": predictor.difference},
        "device": predictor.engine.device,
        "run_id": card.lineage.run_id,
        "refused": {"version": refused.version, "reason": refused.reason} if refused else None,
    }
