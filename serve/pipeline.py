"""From a request to its probabilities: body, payload, a place in the queue, decoded images, the model's answer."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar, TypeVarTuple, Unpack

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request

from serve.batching.batcher import NotFiniteError
from serve.batching.leaving import answer_or_leave
from serve.engines.cores import count_cores
from serve.errors import DeadlineError, MalformedError, TensorError
from serve.models.served import ServedModel
from serve.operations.current import note_model
from serve.operations.memory import DecodeRoom
from serve.operations.metrics import Metrics
from serve.protocol.body import BodyReader
from serve.protocol.payload import to_images
from serve.settings import Settings
from zoo.preprocess import ImageLimits

TIMEOUT_HEADER = "x-request-timeout-ms"
_INLINE_BYTES = 65_536  # parsing less than this takes less time than handing it to another thread and back


class Asked(Protocol):
    """What a protocol makes of a body: the images, and whatever else its answer wants to know."""

    @property
    def images(self) -> Sequence[bytes] | NDArray[np.float32]:
        """Image files, or a tensor (B, 3, height, width)."""
        ...


AskedT = TypeVar("AskedT", bound=Asked)
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Parse = Callable[[Request, bytes, Settings], AskedT]


class Pipeline:
    """The stages that every route that predicts has in common."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._settings = settings
        self._bodies = BodyReader(settings)
        self._read_times, self._decode_times = metrics.stages.labels("read"), metrics.stages.labels("decode")
        self._limits = ImageLimits(settings.max_pixels, DecodeRoom())
        self._decoders = ThreadPoolExecutor(settings.threads or count_cores(), thread_name_prefix="decode")

    async def answer(
        self, request: Request, served: ServedModel, parse: Parse[AskedT]
    ) -> tuple[AskedT, NDArray[np.float32]]:
        """Answer one request, whatever protocol it speaks.

        Args:
            request: The request, its body not yet read.
            served: What answers it; kept in use by the caller.
            parse: From the whole body to what is asked; called in another thread where the body is large.

        Returns:
            What `parse` made of the body, and the probabilities, (B, K).

        Raises:
            ServeError: Any that `serve.errors.STATUSES` lists.
            ImageError: If an image is none.
        """
        deadline = asyncio.get_running_loop().time() + self._read_timeout_s(request)
        try:
            async with asyncio.timeout_at(deadline) as timer:
                started = time.perf_counter()
                async with self._bodies.read(request) as body:
                    self._read_times.observe(time.perf_counter() - started)
                    asked = await self._parse(request, body, parse)
                    return asked, await answer_or_leave(request, self._compute(asked, served, deadline))
        except TimeoutError as error:
            if not timer.expired():
                raise  # of something else, so a fault of ours
            raise DeadlineError("no answer within the time that a request may take") from error

    async def _parse(self, request: Request, body: bytes, parse: Parse[AskedT]) -> AskedT:
        if len(body) <= _INLINE_BYTES:
            return parse(request, body, self._settings)
        return await self._in_thread(parse, request, body, self._settings)

    async def _compute(self, asked: Asked, served: ServedModel, deadline: float) -> NDArray[np.float32]:
        predictor = served.predictor
        note_model(predictor.name, predictor.version, len(asked.images))
        with served.batcher.reserve(len(asked.images)) as place:
            started = time.perf_counter()
            images = await self._in_thread(to_images, asked.images, predictor.card.preprocessing, self._limits)
            self._decode_times.observe(time.perf_counter() - started)
            try:
                return await place.run(images, deadline)
            except NotFiniteError as error:
                if isinstance(asked.images, np.ndarray):  # no image file can do that
                    raise TensorError("the tensor's numbers are too large for the model: no finite answer") from error
                raise

    async def _in_thread(self, function: Callable[[Unpack[Ts]], T], *args: *Ts) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._decoders, function, *args)

    def _read_timeout_s(self, request: Request) -> float:
        """Read how long the client would wait; never longer than the server would let it."""
        text = request.headers.get(TIMEOUT_HEADER)
        if text is None:
            return self._settings.request_timeout_s
        if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) > 0):
            raise MalformedError(f"{TIMEOUT_HEADER}: wanted a whole number of milliseconds, 1 or more")
        return min(int(text) / 1000, self._settings.request_timeout_s)

    def close(self) -> None:
        """End the threads that decode; nothing may be asked afterwards."""
        self._decoders.shutdown(wait=False, cancel_futures=True)
