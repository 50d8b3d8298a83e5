"""A connection to an endpoint: bounded, patient with one that is busy or going down, quick to say what it refuses."""

import asyncio
import json
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

import httpx
from pydantic import ValidationError

from serve.client.backoff import RETRIED, Backoff, read_retry_after
from serve.client.errors import ClientError
from serve.protocol.schemas import Prediction, Reply

_CONCERNING_ALL = frozenset({401, 403, 404, 405})
_HOPELESS = (httpx.UnsupportedProtocol, httpx.LocalProtocolError)


@dataclass(frozen=True)
class _Failure:
    """Why a try had no prediction, and whether another may have."""

    reason: str
    retried: bool
    status: int | None = None
    asked_s: float = 0
    nobody_there: bool = False


class Client:
    """Asks one endpoint about images, some at a time.

        async with Client("http://localhost:8000") as client:
            print((await client.predict(Path("cat.jpg").read_bytes())).label)

    Args:
        url: Of the endpoint, without /invocations.
        model: Name of the model to ask; None for the endpoint's first.
        api_key: Sent as `Authorization: Bearer`.
        top_k: How many classes to name for each image; None for the endpoint's default.
        concurrency: Most requests at a time; further calls of `predict` wait.
        timeout_s: Seconds that one try may take. The endpoint is told, so that it spends no time on what nobody awaits.
        backoff: When to try again.
        transport: Another way to the endpoint, such as `httpx.ASGITransport`.

    Raises:
        ValueError: If `url` is no http or https URL.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        model: str | None = None,
        api_key: str | None = None,
        top_k: int | None = None,
        concurrency: int = 8,
        timeout_s: float = 30,
        backoff: Backoff | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = check_url(url)
        self._path = f"/models/{quote(model, safe='')}/invocations" if model is not None else "/invocations"
        self._query = {} if top_k is None else {"top_k": top_k}
        self._timeout_s = timeout_s
        self._backoff = backoff or Backoff()
        self._gate = asyncio.Semaphore(concurrency)
        self._answered = False
        headers = {"content-type": "application/octet-stream", "x-request-timeout-ms": str(int(timeout_s * 1000))}
        if api_key is not None:
            headers["authorization"] = f"Bearer {api_key}"
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        self._http = httpx.AsyncClient(
            base_url=self.url, headers=headers, limits=limits, timeout=httpx.Timeout(timeout_s), transport=transport
        )

    async def __aenter__(self) -> Self:
        """Open; returns itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def predict(self, image: bytes) -> Prediction:
        """Ask about one image, the bytes of its file.

        Raises:
            ClientError: If the endpoint refuses it, or does not answer however often it is asked.
        """
        async with self._gate:
            return await self._ask(image)

    async def predict_file(self, path: Path) -> Prediction:
        """Ask about the image in a file; it is read when its turn comes, so that few are in memory.

        Raises:
            ClientError: As `predict`.
            OSError: If the file cannot be read.
        """
        async with self._gate:
            return await self._ask(await asyncio.to_thread(path.read_bytes))

    async def _ask(self, image: bytes) -> Prediction:
        for tries in count(1):
            found = await self._try(image)
            if isinstance(found, Prediction):
                return found
            wait_s = self._backoff.find_wait(tries, found.asked_s) if found.retried else None
            if wait_s is None:
                raise _give_up(found, tries)
            await asyncio.sleep(wait_s)
        raise AssertionError("count() has no end")

    async def _try(self, image: bytes) -> Prediction | _Failure:
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._http.post(self._path, params=self._query, content=image)
        except _HOPELESS as error:
            return _Failure(f"cannot be asked: {_one_line(str(error))}", retried=False)
        except (TimeoutError, httpx.TimeoutException):
            return _Failure(f"no answer within {self._timeout_s:g} s", retried=True)
        except (httpx.TransportError, httpx.DecodingError) as error:
            reason = _one_line(str(error)) or type(error).__name__
            nobody_there = isinstance(error, httpx.ConnectError) and not self._answered
            return _Failure(f"the connection failed: {reason}", retried=True, nobody_there=nobody_there)
        self._answered = True
        if response.status_code != httpx.codes.OK:
            return _read_refusal(response)
        return _read_prediction(response)


def check_url(url: str) -> str:
    """Return the URL without a slash at its end.

    Raises:
        ValueError: If it is no http or https URL.
    """
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError(f"{url!r} is no URL: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"{url!r} is no URL of an endpoint; wanted is one such as http://localhost:8000")
    return url.rstrip("/")


def _read_prediction(response: httpx.Response) -> Prediction | _Failure:
    try:
        (prediction,) = Reply.model_validate_json(response.content).predictions
    except (ValidationError, ValueError):
        return _Failure("answered something else than one prediction; is this the URL of the endpoint?", retried=False)
    return prediction


def _read_refusal(response: httpx.Response) -> _Failure:
    status = response.status_code
    try:
        said = json.loads(response.content)["error"]["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        said = response.reason_phrase
    asked_s = read_retry_after(response.headers.get("retry-after"))
    return _Failure(f"answered {status}: {_one_line(str(said))}", status in RETRIED, status, asked_s)


def _give_up(failure: _Failure, tries: int) -> ClientError:
    times = f" ({tries} tries)" if tries > 1 else ""
    concerns_all = failure.nobody_there or failure.status in _CONCERNING_ALL
    return ClientError(f"{failure.reason}{times}", status=failure.status, concerns_all=concerns_all)


def _one_line(text: str) -> str:
    """Make what a server said fit for a terminal."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))[:300]
