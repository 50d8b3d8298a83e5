"""Open Inference Protocol v2, the one that KServe's and Triton's clients speak."""

from importlib.metadata import version as version_of

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from serve.models.served import ServedModel, Shelf
from serve.operations.vitals import Vitals
from serve.pipeline import Pipeline
from serve.protocol.inference_v2 import build_infer_reply, parse_infer
from serve.protocol.openapi import INFER_BODY, error_replies, infer_replies
from serve.protocol.schemas_v2 import (
    EXTENSIONS,
    OUTPUTS,
    ErrorV2,
    Live,
    ModelMetadata,
    ModelReady,
    Ready,
    ServerMetadata,
    TensorMetadata,
)
from serve.routes.invocations import name_headers

_PLATFORMS = {"onnx": "onnx_onnxv1", "eager": "pytorch_eager", "compile": "pytorch_compile"}
_COMMON = error_replies(ErrorV2, 401, 429, 500, 503)
_BY_NAME = error_replies(ErrorV2, 401, 404, 429, 500, 503)
_VERSIONS = "/v2/models/{name}/versions/{version}"


def build_router(shelf: Shelf, pipeline: Pipeline, vitals: Vitals) -> APIRouter:
    """Build the routes that answer for the models on `shelf`."""
    router = APIRouter(tags=["open inference"])
    _add_server(router, vitals)
    _add_models(router, shelf, vitals)

    @router.post("/v2/models/{name}/infer", openapi_extra=INFER_BODY, responses=infer_replies(), operation_id="infer")
    async def infer(request: Request, name: str) -> Response:
        """Compute the outputs for a batch of images."""
        return await _infer(request, shelf.find(name), pipeline)

    @router.post(
        f"{_VERSIONS}/infer", openapi_extra=INFER_BODY, responses=infer_replies(), operation_id="infer_version"
    )
    async def infer_version(request: Request, name: str, version: str) -> Response:
        """Compute the outputs for a batch of images, by that version or not at all."""
        return await _infer(request, shelf.find(name, version), pipeline)

    return router


async def _infer(request: Request, served: ServedModel, pipeline: Pipeline) -> Response:
    predictor = served.predictor
    with served.use():
        asked, probabilities = await pipeline.answer(request, served, parse_infer)
        labels = [prediction.label for prediction in predictor.name_classes(probabilities, 1)]
        reply = build_infer_reply(asked, probabilities, labels, (predictor.name, predictor.version))
        reply.headers.update(name_headers(served))
        return reply


def _add_server(router: APIRouter, vitals: Vitals) -> None:
    @router.get("/v2/", include_in_schema=False)
    @router.get("/v2", responses=_COMMON, operation_id="server_metadata")
    async def describe_server() -> ServerMetadata:
        """Say what this server is, and which extensions it knows."""
        return ServerMetadata(name="attention-zoo", version=version_of("attention-zoo"), extensions=EXTENSIONS)

    @router.get("/v2/health/live", responses=_COMMON, operation_id="server_live")
    async def check_live() -> Live:
        """Answer 200 while the process is well; 503 means that only a restart helps."""
        vitals.check_alive()
        return Live(live=True)

    @router.get("/v2/health/ready", responses=_COMMON, operation_id="server_ready")
    async def check_ready() -> Ready:
        """Answer 200 while every model answers; 503 while loading, going down or hanging."""
        vitals.check_ready()
        return Ready(live=True, ready=True)


def _add_models(router: APIRouter, shelf: Shelf, vitals: Vitals) -> None:
    def _ready(served: ServedModel) -> ModelReady:
        vitals.check_ready()
        return ModelReady(name=served.predictor.name, ready=True)

    @router.get("/v2/models/{name}", responses=_BY_NAME, operation_id="model_metadata")
    async def describe_model(name: str) -> ModelMetadata:
        """Say what a model takes and gives."""
        return _describe(shelf.find(name))

    @router.get(_VERSIONS, responses=_BY_NAME, operation_id="model_version_metadata")
    async def describe_version(name: str, version: str) -> ModelMetadata:
        """Say what a version of a model takes and gives."""
        return _describe(shelf.find(name, version))

    @router.get("/v2/models/{name}/ready", responses=_BY_NAME, operation_id="model_ready")
    async def check_model(name: str) -> ModelReady:
        """Answer 200 only where the model answers."""
        return _ready(shelf.find(name))

    @router.get(f"{_VERSIONS}/ready", responses=_BY_NAME, operation_id="model_version_ready")
    async def check_version(name: str, version: str) -> ModelReady:
        """Answer 200 only where that version of the model answers."""
        return _ready(shelf.find(name, version))


def _describe(served: ServedModel) -> ModelMetadata:
    predictor = served.predictor
    height, width = predictor.card.preprocessing.size
    either = {"or": f"FP32 [-1,3,{height},{width}]"}  # the protocol has no word for an input of two types
    shapes = {"probabilities": [-1, len(predictor.card.class_names)], "label": [-1]}
    return ModelMetadata(
        name=predictor.name,
        versions=[predictor.version],
        platform=_PLATFORMS[predictor.engine.choice.name],
        inputs=[TensorMetadata(name="image", datatype="BYTES", shape=[-1], parameters=either)],
        outputs=[TensorMetadata(name=name, datatype=OUTPUTS[name], shape=shapes[name]) for name in OUTPUTS],
    )
