"""MLflow's scoring protocol: `POST /invocations`, and the same for each model by name."""

from urllib.parse import quote

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from serve.models.served import ServedModel, Shelf
from serve.pipeline import Pipeline
from serve.protocol.schemas import Reply


def build_router(shelf: Shelf, pipeline: Pipeline) -> APIRouter:
    """Build the routes that answer for the models on `shelf`."""
    router = APIRouter()

    @router.post("/invocations")
    async def invoke(request: Request) -> Response:
        return await _invoke(request, shelf.find())

    @router.post("/models/{name}/invocations")
    async def invoke_by_name(request: Request, name: str) -> Response:
        return await _invoke(request, shelf.find(name))

    async def _invoke(request: Request, served: ServedModel) -> Response:
        with served.use():
            predictions = await pipeline.answer(request, served)
            reply = Reply(predictions=predictions)
            return Response(reply.model_dump_json(), media_type="application/json", headers=name_headers(served))

    return router


def name_headers(served: ServedModel) -> dict[str, str]:
    """Say which model and version answers; a header holds ASCII only."""
    return {
        "x-model-name": quote(served.predictor.name),
        "x-model-version": quote(served.predictor.version),
    }
