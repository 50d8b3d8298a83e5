import logging
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.serve.operations.conftest import Running, read_all, wait_until

Run = Callable[..., Running]
SLOW = b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n"
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


def begin(server: Running) -> socket.socket:
    """Have a request in flight."""
    connection = server.connect()
    connection.sendall(SLOW)
    assert server.app.entered.wait(20)
    return connection


def is_refusing(server: Running) -> bool:
    try:
        server.connect().close()
    except OSError:
        return True
    return False


def test_what_has_begun_is_answered_and_nothing_new_is_taken(run: Run) -> None:
    server = run()
    with begin(server) as busy, server.connect() as idle, server.connect() as half:
        idle.sendall(GET)
        assert idle.recv(1000).startswith(b"HTTP/1.1 200 OK")
        half.sendall(GET[:10])
        wait_until(lambda: server.value("serve_connections") == 3)
        server.server.handle_exit(signal.SIGTERM, None)
        assert server.draining.began
        wait_until(lambda: is_refusing(server))
        assert is_refusing(server)
        assert read_all(idle) == b""
        half.sendall(GET[10:])
        answer = read_all(half)
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert b"\r\nconnection: close\r\n" in answer
        server.app.release.set()
        assert read_all(busy).startswith(b"HTTP/1.1 200 OK")


def test_during_the_grace_new_requests_are_answered_and_sent_elsewhere(run: Run) -> None:
    server = run(grace_s=3600)
    with server.connect() as connection:
        connection.sendall(GET)
        assert b"connection: close" not in connection.recv(1000)
        server.server.handle_exit(signal.SIGTERM, None)
        wait_until(lambda: is_refusing(server), seconds=0.5)
        assert not is_refusing(server)
        connection.sendall(GET)
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b"\r\nconnection: close\r\n" in answer
    assert server.talk(GET).startswith(b"HTTP/1.1 200 OK")


def test_what_takes_too_long_is_cut_with_one_warning(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    server = run(timeout_s=0.2)
    with begin(server) as first, begin(server) as second:
        wait_until(lambda: server.value("serve_requests_in_flight") == 2)
        server.server.handle_exit(signal.SIGTERM, None)
        answers = [read_all(first), read_all(second)]
    for answer in answers:
        assert answer.startswith(b"HTTP/1.1 503 "), answer
        assert b"\r\nretry-after: 1\r\n" in answer
        assert b'"code":"shutting_down"' in answer
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == ["cut after 0.2 s: 2 open requests"]


SCRIPT = """
import logging, time, uvicorn
from serve.operations import draining
logging.basicConfig(level="INFO")
draining._EXIT_S = 0.2

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        print("up", flush=True)
        await receive()
        time.sleep(3600)

config = uvicorn.Config(app, port=0, log_config=None, log_level="warning")
draining.DrainingServer(config, draining.Draining(), grace_s=GRACE, timeout_s=0).run()
"""


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A server whose application never ends; the parameter is its grace."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.replace("GRACE", str(request.param))],
        cwd=Path.cwd(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout
        assert process.stdout.readline() == "up\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("process", [3600], indirect=True)
def test_a_second_signal_leaves_at_once(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    assert process.stderr
    assert "SIGTERM: not ready any more" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 128 + signal.SIGINT


@pytest.mark.slow
@pytest.mark.parametrize("process", [0], indirect=True)
def test_an_application_that_does_not_end_is_left(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "the server does not end by itself" in errors
