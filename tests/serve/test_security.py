"""The whole server as an attacker finds it: no answer shows a path, a trace or what was sent; none is 5xx."""

import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve.__main__ import build_server, open_socket
from serve.app import create_app
from serve.predictor import Predictor
from serve.settings import Settings

KEY = "key-of-alice-0123456789"


@pytest.fixture(scope="module")
def port(predictor: Predictor, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A server with keys on a port of its own."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"alice:{KEY}\n")
    settings = Settings(api_keys_file=keys, host="127.0.0.1", port=0, max_head_bytes=4096, max_body_bytes=10_000)
    server = build_server(settings, create_app(settings, predictor))
    with open_socket("127.0.0.1", 0) as listener:
        listener.listen()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def talk(port: int, request: str, body: bytes = b"") -> tuple[str, str]:
    """Send one request with lines of its own; return the answer's head and body."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(request.replace("\n", "\r\n").encode("latin-1") + b"connection: close\r\n\r\n" + body)
        answer = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    head, _, rest = answer.partition("\r\n\r\n")
    return head, rest


ALLOWED = f"x-api-key: {KEY}\n"
ATTACKS = [
    f"GET /SECRET HTTP/1.1\nhost: x\n{ALLOWED}",
    f"GET /SECRET?SECRET=<script> HTTP/1.1\nhost: SECRET\n{ALLOWED}",
    f"GET //SECRET.example/%2e%2e/etc HTTP/1.1\nhost: x\n{ALLOWED}",
    f"GET http://SECRET/ping HTTP/1.1\nhost: x\n{ALLOWED}",
    f"GET /version/ HTTP/1.1\nhost: SECRET\n{ALLOWED}",
    f"GET /docs HTTP/1.1\nhost: SECRET\n{ALLOWED}",
    f"DELETE /invocations HTTP/1.1\nhost: x\n{ALLOWED}x-SECRET: SECRET\n",
    f"OPTIONS /invocations HTTP/1.1\nhost: x\norigin: http://SECRET\naccess-control-request-method: POST\n{ALLOWED}",
    f"TRACE /ping HTTP/1.1\nhost: x\nSECRET: SECRET\n{ALLOWED}",
    f"GET /models/..%2f..%2fSECRET/invocations HTTP/1.1\nhost: x\n{ALLOWED}",
    f"POST /models/..%2f..%2fSECRET/invocations HTTP/1.1\nhost: x\n{ALLOWED}content-length: 0\n",
    f"POST /models/SECRET%00/invocations HTTP/1.1\nhost: x\n{ALLOWED}content-length: 0\n",
    f"POST /models/SECRET%0d%0aset-cookie:%20a=b/invocations HTTP/1.1\nhost: x\n{ALLOWED}content-length: 0\n",
    f"GET /v2/models/SECRET%ff/versions/../ready HTTP/1.1\nhost: x\n{ALLOWED}",
    f"POST /v2/models/SECRET/infer HTTP/1.1\nhost: x\n{ALLOWED}content-length: 0\n",
    f"POST /invocations HTTP/1.1\nhost: x\n{ALLOWED}content-type: SECRET\ncontent-length: 0\n",
    f"POST /invocations HTTP/1.1\nhost: x\n{ALLOWED}content-length: 0\nx-request-timeout-ms: SECRET\n",
    f"GET /metrics HTTP/1.1\nhost: x\n{ALLOWED}accept: SECRET; version=SECRET\n",
    f"GET /metrics HTTP/1.1\nhost: x\n{ALLOWED}accept: text/plain; version=1.SECRET\n",
    f"GET /ping HTTP/1.1\nhost: x\nx-request-id: SECRET{'x' * 60}\ntraceparent: SECRET\n",
    "GET /metrics HTTP/1.1\nhost: x\nauthorization: Bearer SECRET-0123456789\n",
    "GET /openapi.json HTTP/1.1\nhost: SECRET\n",
    f"GET /openapi.json HTTP/1.1\nhost: SECRET\nx-forwarded-prefix: /SECRET\nx-forwarded-host: SECRET\n{ALLOWED}",
]


@pytest.mark.parametrize("request_", ATTACKS)
def test_no_answer_shows_what_was_sent_or_what_is_here(port: int, request_: str) -> None:
    head, body = talk(port, request_)
    status = int(head.split()[1])
    assert status in (200, 400, 401, 404, 405, 415, 422), head
    answer = head + body
    assert "SECRET" not in answer
    assert "Traceback" not in answer
    assert str(Path.cwd()) not in answer
    assert "site-packages" not in answer
    assert "\r\nserver:" not in head
    assert "\r\nset-cookie:" not in head
    assert "\r\nlocation:" not in head
    assert re.search(r"\r\nx-request-id: [0-9a-f]{32}(\r\n|$)", head), head


def test_two_requests_smuggled_as_one_are_refused(port: int) -> None:
    smuggled = f"GET /metrics HTTP/1.1\r\nhost: x\r\n{ALLOWED}\r\n".encode()
    head, body = talk(
        port,
        f"POST /ping HTTP/1.1\nhost: x\ncontent-length: {len(smuggled)}\ntransfer-encoding: chunked\n",
        b"0\r\n\r\n" + smuggled,
    )
    assert head.startswith("HTTP/1.1 400 Bad Request")
    assert "serve_requests_total" not in body


def test_heads_without_end_and_many_at_a_time_leave_the_server_well(port: int) -> None:
    head, body = talk(port, f"GET /ping HTTP/1.1\nhost: x\n{''.join(f'x-{i}: {i}' + chr(10) for i in range(2000))}")
    assert head.startswith("HTTP/1.1 431 ")
    assert '"large_head"' in body
    connections = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(200)]
    for connection in connections:
        connection.sendall(b"GET / HTTP/1.1\r\nx: ")
    assert talk(port, "GET /health HTTP/1.1\nhost: x\n")[0].startswith("HTTP/1.1 200 OK")
    for connection in connections:
        connection.close()
    assert talk(port, "GET /ready HTTP/1.1\nhost: x\n")[0].startswith("HTTP/1.1 200 OK")
