"""A real server on a port of its own, around whatever application a test wants to see on the wire."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from serve.operations.access_log import AccessLog
from serve.operations.draining import Draining, DrainingServer
from serve.operations.gate import Gate
from serve.operations.guarded_protocol import ConnectionLimits, GuardedProtocol
from serve.operations.metrics import Metrics


@dataclass
class Running:
    """A server in a thread, and what a test asks of it."""

    port: int
    metrics: Metrics
    draining: Draining
    server: DrainingServer
    app: "Echo"

    def connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        connection.settimeout(20)
        return connection

    def talk(self, data: bytes, *, end: bool = False) -> bytes:
        """Send `data`, and return all that comes until the server closes."""
        with self.connect() as connection:
            connection.sendall(data)
            if end:
                connection.shutdown(socket.SHUT_WR)
            return read_all(connection)

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@dataclass
class Echo:
    """Answers the number of bytes of a body. /slow waits for `release`, or until the client left.

    Attributes:
        left: Requests whose client left while they waited.
    """

    release: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)
    left: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        size = 0
        if scope["path"] == "/unread":
            await answer(send, 413, b"no")
            return
        if scope["path"] == "/big":
            await answer(send, 200, bytes(1_000_000))
            return
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left += 1
                return
            size += len(message["body"])
            if not message["more_body"]:
                break
        if scope["path"] == "/slow":
            self.entered.set()
            leaving = asyncio.ensure_future(receive())
            while not self.release.is_set() and not leaving.done():
                await asyncio.sleep(0.01)
            if leaving.done():
                self.left += 1
            leaving.cancel()
        await answer(send, 200, str(size).encode())


async def answer(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def read_all(connection: socket.socket) -> bytes:
    """Read until the other side ends; a reset ends it too."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionError:
        parts.append(b"<reset>")
    return b"".join(parts)


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Wait for what happens in the server's thread; a test that waits in vain fails by its assertion afterwards."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)


@contextmanager
def run_echo(
    limits: ConnectionLimits, keep_alive_s: float = 20, timeout_s: float = 5, grace_s: float = 0
) -> Iterator[Running]:
    metrics, draining, echo = Metrics(), Draining(), Echo()
    wrapped = AccessLog(Gate(echo, None, None, lambda _: None), metrics)
    config = uvicorn.Config(
        wrapped,
        loop="uvloop",
        http=partial(GuardedProtocol, limits=limits, metrics=metrics, draining=draining),  # type: ignore[arg-type]
        lifespan="off",
        ws="none",
        log_config=None,
        server_header=False,
        timeout_keep_alive=keep_alive_s,  # type: ignore[arg-type]
    )
    server = DrainingServer(config, draining, grace_s=grace_s, timeout_s=timeout_s)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_until(lambda: server.started)
            yield Running(listener.getsockname()[1], metrics, draining, server, echo)
        finally:
            echo.release.set()
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


@pytest.fixture
def run() -> Iterator[Callable[..., Running]]:
    """Start servers that end with the test: `run(max_head_bytes=2000)`."""
    with ExitStack() as stack:

        def start(*, keep_alive_s: float = 20, timeout_s: float = 5, grace_s: float = 0, **limits: float) -> Running:
            bounds = ConnectionLimits(**limits)  # type: ignore[arg-type]
            return stack.enter_context(run_echo(bounds, keep_alive_s, timeout_s, grace_s))

        yield start
