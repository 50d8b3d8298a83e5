"""An endpoint that answers what it is told to: busy, going down, dropping connections, and then well."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

DROP = "drop"
"""Close the connection without a word."""
DRIP = "drip"
"""Answer a byte now and then, for as long as anyone listens."""
Answer = tuple[int, dict[str, str], bytes]


def busy(status: int, retry_after: str | None = None) -> Answer:
    headers = {} if retry_after is None else {"retry-after": retry_after}
    body = {"error": {"code": "planted", "message": "planted\nrefusal"}}
    return status, headers, json.dumps(body).encode()


def prediction(label: str) -> Answer:
    score = {"label": label, "probability": 0.75}
    return 200, {}, json.dumps({"predictions": [{**score, "top": [score]}]}).encode()


def drip(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("content-length", "1000")
    handler.end_headers()
    for _ in range(1000):
        handler.wfile.write(b" ")
        time.sleep(0.01)


@dataclass
class Planted:
    """Answers what `script` says, one entry for each request; afterwards with the body as label, where that is text."""

    script: list[Answer | str] = field(default_factory=list)
    delay_s: float = 0
    held_from: int | None = None
    """Number of the first request that waits for `release`."""
    release: threading.Event = field(default_factory=threading.Event)
    asked: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    url: str = ""
    most_at_once: int = 0
    _at_once: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers["content-length"]))
        with self._lock:
            self.asked.append((handler.path, {k.lower(): v for k, v in handler.headers.items()}, body))
            held = self.held_from is not None and len(self.asked) > self.held_from
            answer = self.script.pop(0) if self.script else prediction(body.decode() if body.isascii() else "binary")
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        time.sleep(self.delay_s)
        if held:
            self.release.wait(60)
        with self._lock:
            self._at_once -= 1
        if isinstance(answer, str):
            handler.close_connection = True
            if answer == DRIP:
                drip(handler)
            return
        status, headers, content = answer
        handler.send_response(status)
        for name, value in {**headers, "content-length": str(len(content))}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(content)


@pytest.fixture
def planted() -> Iterator[Planted]:
    endpoint = Planted()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            with suppress(ConnectionError):  # a client that does not wait
                endpoint.handle(self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    endpoint.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield endpoint
    server.shutdown()
    thread.join()
    server.server_close()
