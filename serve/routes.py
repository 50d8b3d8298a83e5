"""The endpoints. A request goes payload -> images -> predictor -> reply; only the middle two leave the event loop."""

from importlib.metadata import version
from urllib.parse import quote

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from serve.payload import Payload, parse_body, read_body, to_images
from serve.predictor import Predictor
from serve.schemas import Prediction, Reply
from serve.settings import Settings
from zoo.preprocess import ImageLimits

_PROBE = ["GET", "HEAD"]


def build_router(settings: Settings, predictor: Predictor) -> APIRouter:
    """Build the routes that answer for `predictor`."""
    router = APIRouter()
    limits = ImageLimits(max_pixels=settings.max_pixels)
    headers = {  # a header holds ASCII only
        "x-model-name": quote(predictor.name),
        "x-model-version": quote(predictor.version),
    }

    def answer(payload: Payload) -> list[Prediction]:
        images = to_images(payload, predictor.card.preprocessing, limits)
        return predictor.label(images, payload.top_k)

    @router.post("/invocations")
    async def invoke(request: Request) -> Response:
        body = await read_body(request.headers, request.stream(), settings.max_body_bytes)
        payload = await parse_body(request.headers, body, settings)
        reply = Reply(predictions=await run_in_threadpool(answer, payload))
        return Response(reply.model_dump_json(), media_type="application/json", headers=headers)

    @router.api_route("/ping", methods=_PROBE)
    @router.api_route("/health", methods=_PROBE)
    async def check_alive() -> Response:
        return JSONResponse({"status": "ok"})

    @router.api_route("/ready", methods=_PROBE)
    async def check_ready() -> Response:
        return JSONResponse({"status": "ready"}, headers=headers)

    @router.get("/version")
    async def describe() -> Response:
        card = predictor.card
        model = {
            "name": predictor.name,
            "version": predictor.version,
            "backbone": card.backbone,
            "attention": card.attention,
            "num_classes": len(card.class_names),
            "run_id": card.lineage.run_id,
        }
        return JSONResponse({"attention_zoo": version("attention-zoo"), "model": model}, headers=headers)

    return router
