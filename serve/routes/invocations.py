"""MLflow's scoring protocol: `POST /invocations`, and the same for each model by name."""

from urllib.parse import quote

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from serve.models.served import ServedModel, Shelf
from serve.pipeline import Pipeline
from serve.protocol.openapi import SCORING_BODY, scoring_replies
from serve.protocol.schemas import Reply
from serve.protocol.scoring import parse_scoring


def build_router(shelf: Shelf, pipeline: Pipeline) -> APIRouter:
    """Build the routes that answer for the models on `shelf`."""
    router = APIRouter(tags=["scoring"])

    @router.post("/invocations", openapi_extra=SCORING_BODY, responses=scoring_replies(), operation_id="invoke")
    async def invoke(request: Request) -> Response:
        """Name the classes of images, by the default model."""
        return await _invoke(request, shelf.find())

    @router.post(
        "/models/{name}/invocations",
        openapi_extra=SCORING_BODY,
        responses=scoring_replies(),
        operation_id="invoke_model",
    )
    async def invoke_by_name(request: Request, name: str) -> Response:
        """Name the classes of images, by the model of that name."""
        return await _invoke(request, shelf.find(name))

    async def _invoke(request: Request, served: ServedModel) -> Response:
        with served.use():
            payload, probabilities = await pipeline.answer(request, served, parse_scoring)
            reply = Reply(predictions=served.predictor.name_classes(probabilities, payload.top_k))
            return Response(reply.model_dump_json(), media_type="application/json", headers=name_headers(served))

    return router


def name_headers(served: ServedModel) -> dict[str, str]:
    """Say which model and version answers; a header holds ASCII only."""
    return {
        "x-model-name": quote(served.predictor.name),
        "x-model-version": quote(served.predictor.version),
    }
