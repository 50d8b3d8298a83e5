"""From a request to its predictions: body, payload, a place in the queue, decoded images, probabilities, names."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from starlette.requests import Request

from serve.models.served import ServedModel
from serve.operations.metrics import Metrics
from serve.protocol.payload import parse_body, read_body, to_images
from serve.protocol.schemas import Prediction
from serve.settings import Settings
from zoo.preprocess import ImageLimits


class Pipeline:
    """The stages that every route that predicts has in common."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._limits = ImageLimits(max_pixels=settings.max_pixels)
        self._decoders = ThreadPoolExecutor(settings.threads or None, thread_name_prefix="decode")

    async def answer(self, request: Request, served: ServedModel) -> list[Prediction]:
        """Answer one request of the scoring protocol; raises what `serve.errors` lists."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.request_timeout_s
        predictor = served.predictor
        body = await read_body(request.headers, request.stream(), self._settings.max_body_bytes)
        payload = await parse_body(request.headers, body, self._settings)
        with served.batcher.reserve(len(payload.images)) as place:
            preprocessing = predictor.card.preprocessing
            images = await loop.run_in_executor(self._decoders, to_images, payload, preprocessing, self._limits)
            probabilities = await place.run(images, deadline)
        return predictor.name_classes(probabilities, payload.top_k)
