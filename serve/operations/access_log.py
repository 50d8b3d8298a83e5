"""The outermost layer of the application: ids, access log, request metrics, and the last word on a fault."""

import asyncio
import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.operations.answers import answer_fault, answer_going
from serve.operations.current import CURRENT, CurrentRequest, read_request
from serve.operations.gate import PROBES
from serve.operations.metrics import Metrics

logger = logging.getLogger("serve.access")
faults = logging.getLogger("serve")

_CLIENT_LEFT = 499  # nginx's number: no answer was read
_OTHER = "other"
_SAID = frozenset({"method", "route", "status"})  # fields that the message holds


class AccessLog:
    """ASGI middleware around all others.

    A layer of plain ASGI: what Starlette builds on BaseHTTPMiddleware runs each request in another task and hides
    that a client has left.

    Args:
        app: What answers.
        metrics: Where requests are counted.
        log: Whether to log a line for each request; one at debug for a probe that succeeds.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, *, log: bool = True) -> None:
        self._app, self._metrics, self._log = app, metrics, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whatever happens."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        current = read_request(scope["headers"])
        exchange = _Exchange(receive, send, current.request_id)
        token = CURRENT.set(current)
        began = time.perf_counter()
        self._metrics.in_flight.inc()
        try:
            await self._answer(scope, exchange)
        finally:
            self._metrics.in_flight.dec()
            self._account(scope, current, exchange, time.perf_counter() - began)
            CURRENT.reset(token)

    async def _answer(self, scope: Scope, exchange: "_Exchange") -> None:
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except asyncio.CancelledError:  # only the end of the server's patience cancels a request
            if not exchange.status:
                await answer_going(scope)(scope, exchange.receive, exchange.send)
        except Exception as error:
            faults.error("a request failed by our own fault: %s", type(error).__name__, exc_info=error)
            if not exchange.status:
                await answer_fault(scope)(scope, exchange.receive, exchange.send)

    def _account(self, scope: Scope, current: CurrentRequest, exchange: "_Exchange", seconds: float) -> None:
        route = getattr(scope.get("route"), "path", _OTHER)
        status = exchange.final_status()
        self._metrics.observe_request(route, current.model, status, seconds)
        quiet = status < 400 and scope["path"] in PROBES
        level = logging.DEBUG if quiet else logging.INFO
        if not self._log or not logger.isEnabledFor(level):
            return
        fields: dict[str, object] = {
            "method": scope["method"],
            "route": route,
            "status": status,
            "ms": round(seconds * 1000, 2),
            "bytes_in": exchange.bytes_in,
            "bytes_out": exchange.bytes_out,
            "client": scope["client"][0] if scope.get("client") else "local",
        }
        if current.key:
            fields["key"] = current.key
        if current.model:
            fields |= {"model": current.model, "version": current.version, "images": current.images}
        logger.log(level, "%s %s %s", scope["method"], route, status, extra={"fields": fields, "said": _SAID})


class _Exchange:
    """What passes between the server and the application in one request, counted."""

    __slots__ = ("_receive", "_request_id", "_send", "bytes_in", "bytes_out", "complete", "left", "status")

    def __init__(self, receive: Receive, send: Send, request_id: str) -> None:
        self._receive, self._send = receive, send
        self._request_id = request_id.encode("ascii")
        self.bytes_in = self.bytes_out = self.status = 0
        self.left = self.complete = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self.bytes_in += len(message.get("body", b""))
        elif not self.complete:
            self.left = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self._request_id)]
        else:
            self.bytes_out += len(message.get("body", b""))
            self.complete = not message.get("more_body", False)
        await self._send(message)

    def final_status(self) -> int:
        """The status as the client saw it: 499 if it left, 500 if the answer broke off."""
        if self.left:
            return _CLIENT_LEFT
        return self.status if self.complete else 500
