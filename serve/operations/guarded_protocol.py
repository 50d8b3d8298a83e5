"""HTTP/1.1 on one connection, with the bounds that uvicorn leaves to a proxy.

uvicorn reads a head of any size for any time, counts its limit of connections against probes too, and takes the end
of a client's sending for the end of the client. Here a head is bounded in bytes, fields and seconds, and a client that
has sent all (half-closed the connection) gets its answer.
"""

import asyncio
import logging
import socket
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serve.errors import QueueFullError
from serve.operations.draining import Draining
from serve.operations.gate import REFUSAL
from serve.operations.metrics import Metrics
from serve.operations.refusals import BROKEN, CROWDED, LARGE_HEAD, PIPELINED, SHORT_BODY, SLOW_HEAD, Refusal

logger = logging.getLogger("serve.access")

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_MAX_FIELDS = 100
_MAX_PIPELINED = 100
_RESERVE = 32
_LINGER_S = 2.0
_MAX_LINGER_BYTES = 1 << 20
_NEW_S = 1.0
_FIRST_PROBE_S, _LAST_PROBE_S = 0.05, 2.0


@dataclass(frozen=True)
class ConnectionLimits:
    """What one connection, and all together, may take.

    Attributes:
        max_connections: Most open connections; a request on one more is refused, unless it is a probe.
        head_timeout_s: Seconds for a head, from the connection or the head's first byte.
        max_head_bytes: Bytes of a request's target and header fields.
        unread_timeout_s: Seconds that an answer may wait for a client that does not read.
    """

    max_connections: int = 1024
    head_timeout_s: float = 10
    max_head_bytes: int = 32 * 1024
    unread_timeout_s: float = 30


class _Closing:
    """The transport as uvicorn's request sees it: it lingers when it is to be closed."""

    def __init__(self, protocol: "GuardedProtocol") -> None:
        self._protocol = protocol

    def write(self, data: bytes) -> None:
        if not self._protocol.transport.is_closing():  # uvloop raises where asyncio drops it
            self._protocol.transport.write(data)

    def is_closing(self) -> bool:
        return self._protocol.transport.is_closing()

    def close(self) -> None:
        self._protocol.linger()


class GuardedProtocol(HttpToolsProtocol):
    """One connection; `functools.partial` with limits, metrics and draining makes it uvicorn's `http`."""

    def __init__(self, *, limits: ConnectionLimits, metrics: Metrics, draining: Draining, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._limits, self._metrics, self._draining = limits, metrics, draining
        self._timer: asyncio.TimerHandle | None = None
        self._head_bytes = self._fed_bytes = self._fields = self._linger_bytes = 0
        self._in_head = self._is_deaf = self._is_surplus = self._has_ended = self._is_used = False
        self._refusal: Refusal | None = None
        self._closing = _Closing(self)
        self._context = copy_context()  # a timer that a request arms must not log with that request's id

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for a head; refuse at once what is far beyond the limit of connections."""
        super().connection_made(transport)
        self._metrics.connections.inc()
        own = transport.get_extra_info("socket")
        if own is not None and own.family != socket.AF_UNIX and hasattr(socket, "TCP_USER_TIMEOUT"):
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self._limits.unread_timeout_s * 1000))
        surplus = len(self.connections) - self._limits.max_connections
        self._is_surplus = surplus > 0
        if surplus > _RESERVE:
            self._refuse(CROWDED)
        else:
            self._arm(self._limits.head_timeout_s, self._end_head)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection; the request that is being answered learns that its client left."""
        self._disarm()
        self._metrics.connections.dec()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came, within the limits."""
        self._unset_keepalive_if_required()
        self._is_used = True
        if self._is_deaf or (self.cycle is not None and self.cycle.response_complete and self.cycle.more_body):
            self._linger_bytes += len(data)
            if self._linger_bytes > _MAX_LINGER_BYTES:
                self.transport.abort()
            if self._is_deaf or self.transport.is_closing():
                return
        self._fed_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # another protocol is declined by answering in this one
            if self.cycle is not None:
                self.cycle.keep_alive = False
        except httptools.HttpParserError:
            self._refuse(self._refusal or BROKEN)
            return
        if self._in_head and self._fed_bytes > self._limits.max_head_bytes:
            self._refuse(LARGE_HEAD)
        elif not self.is_busy and self._timer is None and self.timeout_keep_alive_task is None:
            self._arm(self._limits.head_timeout_s, self._end_head)

    def on_message_begin(self) -> None:
        """Start a head."""
        super().on_message_begin()
        self._in_head, self._head_bytes, self._fields = True, 0, 0

    def on_url(self, url: bytes) -> None:
        """Take a part of the target."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a field."""
        self._fields += 1
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start to answer a request."""
        self._in_head, self._linger_bytes = False, 0
        self._disarm()
        if len(self.pipeline) >= _MAX_PIPELINED:
            self._raise(PIPELINED)
        super().on_headers_complete()
        self.cycle.transport = self._closing  # type: ignore[assignment]
        if self._is_surplus:  # the gate heeds it for all but probes
            scope: dict[str, Any] = self.scope  # type: ignore[assignment]
            scope[REFUSAL] = QueueFullError(CROWDED.message)
        if self._is_surplus or self._draining.began:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        """End a body; one that was answered before it was all here lets the connection go on."""
        self._fed_bytes = 0  # what follows in this piece of data is of the next head, and is counted by its fields
        super().on_message_complete()
        if self.cycle.response_complete and self.cycle.more_body:
            self.cycle.more_body = False
            self._disarm()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the rest of a body that nobody reads: not for long."""
        super().on_response_complete()
        if self.is_busy or self.transport.is_closing():
            return
        if self._is_deaf:
            self._unset_keepalive_if_required()
        elif self.cycle.more_body:
            self._unset_keepalive_if_required()
            if self.expect_100_continue:  # the body may never come, so no next request can be told from it
                self.linger()
            else:
                self._arm(_LINGER_S, self.transport.abort)
        elif self._in_head:
            self._unset_keepalive_if_required()
            self._arm(self._limits.head_timeout_s, self._end_head)
        elif self._has_ended:
            self.transport.close()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Answer what was asked before the client closed its side; what can never be whole is refused."""
        self._has_ended = True
        if self._is_deaf:
            return None
        if self._in_head or (self.is_busy and self.cycle.more_body):
            self._refuse(SHORT_BODY)
            return True
        if not self.is_busy:
            return None
        self.cycle.keep_alive = False
        self._probe(_FIRST_PROBE_S)
        return True

    def linger(self) -> None:
        """Close after an answer; where a body is still coming, not before the client could read why it is refused.

        A connection that is closed while bytes come in is reset, and the reset may overtake the answer.
        """
        if self._has_ended or not self.cycle.more_body:
            self.transport.close()
            return
        self._is_deaf = True
        self.transport.write_eof()
        self._arm(_LINGER_S, self.transport.abort)

    def shutdown(self) -> None:
        """Close when what has begun is answered; a connection that is just made may have sent its request already."""
        if self.is_busy:
            self.cycle.keep_alive = False
        elif not self._is_used:
            self._arm(min(_NEW_S, self._limits.head_timeout_s), self.transport.close)
        elif not self._in_head:
            self.transport.close()

    def _probe(self, after_s: float) -> None:
        """Find out whether the client only ended its sending, or left: a left one's system resets what is sent to it.

        An interim answer is what may be sent before the answer, any number of times; HTTP/1.0 has none.
        """
        if not self.is_busy or self.transport.is_closing() or self.scope["http_version"] != "1.1":
            return
        if not self.cycle.response_started and not self.pipeline:
            self.transport.write(_CONTINUE)
            self._arm(after_s, self._probe, min(2 * after_s, _LAST_PROBE_S))

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self._limits.max_head_bytes or self._fields > _MAX_FIELDS:
            self._raise(LARGE_HEAD)

    def _raise(self, refusal: Refusal) -> None:
        self._refusal = refusal
        raise ValueError(refusal.code)  # out of the parser's callback, so that it stops

    def _end_head(self) -> None:
        """End a connection whose time is up: with a word if it began to ask.

        One that never did may be a client's store for later: it would take the word for the answer to its request.
        """
        self._timer = None
        if self._in_head:
            self._refuse(SLOW_HEAD)
        else:
            self.transport.close()

    def _refuse(self, refusal: Refusal) -> None:
        """Answer by ourselves, then hear nothing more; the client has time to read it before the connection ends."""
        self._is_deaf = True
        self._metrics.refused_connections.labels(refusal.code).inc()
        client = self.client[0] if self.client else "local"
        fields = {"status": int(refusal.status), "code": refusal.code, "client": client}
        logger.info("refused a connection", extra={"fields": fields})
        has_begun = False
        if self.is_busy:  # its application learns that the client is gone
            has_begun = self.cycle.response_started
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.transport.is_closing():
            return
        if has_begun or self.pipeline:
            self.transport.close()
            return
        self.transport.write(refusal.render())
        if self._has_ended:
            self.transport.close()
            return
        self.transport.write_eof()
        self._arm(_LINGER_S, self.transport.abort)

    def _arm(self, seconds: float, callback: Any, *arguments: Any) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, callback, *arguments, context=self._context)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
