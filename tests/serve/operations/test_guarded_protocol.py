"""Connections as bad clients make them, on a real socket."""

import json
import logging
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from serve.operations.current import CURRENT
from serve.operations.guarded_protocol import ConnectionLimits
from tests.serve.operations.conftest import Running, read_all, run_echo, wait_until

Run = Callable[..., Running]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """For tests that need no limits of their own and count nothing."""
    with run_echo(ConnectionLimits(max_head_bytes=2000)) as running:
        yield running


def get(path: str = "/", more: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: x\r\n{more}\r\n".encode()


def assert_refused(answer: bytes, status: int, code: str) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()), answer
    assert b"\r\ncontent-type: application/json\r\n" in head
    assert b"\r\nconnection: close" in head
    assert f"content-length: {len(body)}".encode() in head
    assert json.loads(body)["error"]["code"] == code


def test_a_head_that_does_not_come_in_time_is_408(run: Run) -> None:
    server = run(head_timeout_s=0.1)
    assert_refused(server.talk(b"GET / HTTP/1.1\r\nhost: "), 408, "slow_head")
    assert server.value("serve_connections_refused_total", reason="slow_head") == 1


@pytest.mark.parametrize("sent", [b"", b"\r\n\r\n", b"G"])
def test_a_connection_that_asks_nothing_is_closed(run: Run, sent: bytes) -> None:
    server = run(head_timeout_s=0.1)
    answer = server.talk(sent)
    assert answer == b"" if sent != b"G" else b"slow_head" in answer
    wait_until(lambda: server.value("serve_connections") == 0)
    assert server.value("serve_connections") == 0


def test_the_second_head_on_a_connection_has_the_same_time(run: Run) -> None:
    server = run(head_timeout_s=0.1)
    with server.connect() as connection:
        connection.sendall(get())
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 OK")
        connection.sendall(b"GET / HT")
        assert_refused(read_all(connection), 408, "slow_head")
    with server.connect() as connection:  # here the head begins while the first request is answered
        connection.sendall(get("/slow") + b"GET / HT")
        assert server.app.entered.wait(20)
        server.app.release.set()
        answers = read_all(connection)
    first, _, second = answers.partition(b"\r\n\r\n0")
    assert first.startswith(b"HTTP/1.1 200 OK")
    assert_refused(second, 408, "slow_head")


def test_a_refusal_is_logged_without_the_id_of_the_request_before(run: Run) -> None:
    seen = []

    class Spy(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            current = CURRENT.get()
            seen.append((record.getMessage(), current and current.request_id))

    logger, spy = logging.getLogger("serve.access"), Spy()
    before = logger.level
    logger.addHandler(spy)
    logger.setLevel(logging.INFO)
    try:
        run(head_timeout_s=0.1).talk(get(more="x-request-id: mine\r\n") + b"GET / HT")
    finally:
        logger.removeHandler(spy)
        logger.setLevel(before)
    assert seen == [("GET other 200", "mine"), ("refused a connection", None)]


def test_line_ends_do_not_keep_an_idle_connection_alive(run: Run) -> None:
    server = run(head_timeout_s=0.1, keep_alive_s=20)
    with server.connect() as connection:
        connection.sendall(get())
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 OK")
        connection.sendall(b"\r\n")
        assert read_all(connection) == b""


@pytest.mark.parametrize(
    "head",
    [
        get("/" + "x" * 3000),
        get(more=f"a: {'x' * 3000}\r\n"),
        get(more=f"{'x' * 3000}: a\r\n"),
        get(more="a: b\r\n" * 100),
        get(more=f"a: {'x' * 900}\r\n" * 3),
        get(more=f"a: {'x' * 3000}")[:-2],  # not ended
        b"GET /" + b"x" * 3000,
    ],
    ids=["target", "value", "name", "fields", "together", "unended value", "unended target"],
)
def test_a_head_beyond_the_limit_is_431(server: Running, head: bytes) -> None:
    assert_refused(server.talk(head), 431, "large_head")


def test_a_head_and_a_body_that_come_together_are_not_one_large_head(server: Running) -> None:
    body = b"x" * 10_000
    post = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10000\r\n"
    answers = server.talk(post + b"\r\n" + body + post + b"connection: close\r\n\r\n" + body)
    assert answers.count(b"HTTP/1.1 200 OK") == 2
    with server.connect() as connection:
        connection.sendall(post + b"\r\n" + body)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 OK")
        connection.sendall(b"GET / HT")  # not yet whole when the server reads it
        wait_until(lambda: False, seconds=0.05)
        connection.sendall(get(more="connection: close\r\n")[8:])
        assert read_all(connection).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.1\r\nSECRET\r\n\r\n",
        b"CONNECT SECRET:80 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET \xffSECRET HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nSECRET\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nx: a\r\n b\r\nc: d\rSECRET: e\r\n\r\n",
    ],
)
def test_what_is_not_http_is_400_without_an_echo(server: Running, sent: bytes) -> None:
    answer = server.talk(sent)
    assert_refused(answer, 400, "bad_request")
    assert b"SECRET" not in answer


def test_another_protocol_is_declined_by_an_answer_in_this_one(server: Running) -> None:
    answer = server.talk(get(more="connection: upgrade\r\nupgrade: websocket\r\n"))
    assert answer.startswith(b"HTTP/1.1 200 OK")


def test_a_client_that_closed_its_side_gets_its_answer(run: Run) -> None:
    server = run()
    post = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc"
    assert server.talk(post, end=True).endswith(b"\r\n\r\n3")
    with server.connect() as connection:
        connection.sendall(get("/slow"))
        assert server.app.entered.wait(20)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1000).startswith(b"HTTP/1.1 100 Continue\r\n\r\n")  # how it learns whether we left
        server.app.release.set()
        assert read_all(connection).endswith(b"\r\nconnection: close\r\n\r\n0")
    wait_until(lambda: server.value("serve_connections") == 0)
    assert (server.value("serve_connections"), server.app.left) == (0, 0)


@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_client_that_left_is_noticed_while_its_request_waits(run: Run, how: str) -> None:
    server = run()
    with server.connect() as connection:
        connection.sendall(get("/slow"))
        assert server.app.entered.wait(20)
        if how == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_until(lambda: server.value("serve_requests_in_flight") == 0)
    assert server.app.left == 1
    assert server.value("serve_requests_total", route="other", model="none", status="499") == 1


@pytest.mark.parametrize(
    "sent", [b"GET / HT", b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nabc", get()[:-2]]
)
def test_a_request_that_ends_before_it_is_whole_is_400(server: Running, sent: bytes) -> None:
    assert_refused(server.talk(sent, end=True), 400, "short_body")
    wait_until(lambda: server.value("serve_connections") == 0)
    assert (server.value("serve_connections"), server.value("serve_requests_in_flight")) == (0, 0)


def test_who_is_refused_while_sending_can_read_why(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    head = "POST /unread HTTP/1.1\r\nhost: x\r\ncontent-length: 400000\r\n"
    answer = server.talk(f"{head}connection: close\r\n\r\n".encode() + bytes(400_000))
    assert answer.startswith(b"HTTP/1.1 413"), answer[:100]
    assert answer.endswith(b"\r\n\r\nno"), answer[-100:]
    monkeypatch.setattr("serve.operations.guarded_protocol._LINGER_S", 3600)  # not its end lets the next one read on
    answer = server.talk(f"{head}expect: 100-continue\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 413"), answer


def test_after_an_unread_body_the_connection_goes_on(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.operations.guarded_protocol._LINGER_S", 0.5)
    with server.connect() as connection:
        connection.sendall(b"POST /unread HTTP/1.1\r\nhost: x\r\ncontent-length: 4000\r\n\r\n" + bytes(1000))
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")
        connection.sendall(bytes(3000))
        wait_until(lambda: False, seconds=0.7)  # it waits for the next request now, not for a body
        connection.sendall(get(more="connection: close\r\n"))
        assert read_all(connection).startswith(b"HTTP/1.1 200 OK")


def test_an_unread_body_without_end_is_cut(server: Running) -> None:
    with server.connect() as connection:
        connection.sendall(b"POST /unread HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")
        with pytest.raises(ConnectionError):
            connection.sendall((b"fff\r\n" + bytes(0xFFF) + b"\r\n") * 10_000)


def test_beyond_the_limit_of_connections_only_probes_are_answered(run: Run) -> None:
    server = run(max_connections=2)
    with ExitStack() as stack:
        first, *_ = [stack.enter_context(server.connect()) for _ in range(2)]
        wait_until(lambda: server.value("serve_connections") == 2)
        answer = server.talk(get("/x"))
        assert answer.startswith(b"HTTP/1.1 503"), answer
        assert b"\r\nretry-after: 1\r\n" in answer
        assert b"too many open connections" in answer
        assert server.talk(get("/health")).startswith(b"HTTP/1.1 200 OK")
        wait_until(lambda: server.value("serve_connections") == 2)
        for _ in range(33):  # 32 are kept for probes
            stack.enter_context(server.connect())
        answer = server.talk(b"")
        assert_refused(answer, 503, "crowded")
        assert b"\r\nretry-after: 1\r\n" in answer
        first.sendall(get())
        assert first.recv(1000).startswith(b"HTTP/1.1 200 OK")


def test_requests_may_be_pipelined_but_not_without_end(run: Run) -> None:
    server = run()
    assert server.talk(get() * 90 + get(more="connection: close\r\n")).count(b"HTTP/1.1 200 OK") == 91
    assert b"HTTP/1.1" not in server.talk(get("/slow") + get() * 200)
    assert server.value("serve_connections_refused_total", reason="pipelined") == 1


@pytest.mark.slow
def test_a_client_that_never_reads_is_cut(run: Run) -> None:
    server = run(unread_timeout_s=1)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(get("/big") * 20)
        wait_until(lambda: server.value("serve_connections") == 1)
        wait_until(lambda: server.value("serve_connections") == 0)
        assert server.value("serve_connections") == 0
    assert server.value("serve_requests_in_flight") == 0
