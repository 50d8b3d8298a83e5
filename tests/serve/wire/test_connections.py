"""Clients that send badly: slowly, half, too much, in pieces, or along tricky paths."""

import socket
import time

import httpx
import pytest

from tests.serve.wire.conftest import Wire

pytestmark = pytest.mark.slow

POST = b"POST /invocations HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\n"
CLOSE = b"Connection: close\r\n"


def chunked(*chunks: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))


def status(answer: bytes) -> int:
    assert answer.startswith(b"HTTP/1.1 "), answer[:200]
    assert b"Traceback" not in answer
    return int(answer[9:12])


@pytest.fixture(autouse=True)
def still_well(wire: Wire, images: list[bytes]) -> None:
    """After every test before, a good request is answered."""
    answer = httpx.post(f"{wire.url}/invocations", content=images[0], headers={"content-type": "image/png"})
    assert answer.status_code == 200, answer.text


def test_chunks_without_a_length_are_read(wire: Wire, images: list[bytes]) -> None:
    head = POST + CLOSE + b"Transfer-Encoding: chunked\r\n\r\n"
    pieces = [images[0][i : i + 100] for i in range(0, len(images[0]), 100)]
    assert status(wire.talk(head + chunked(*pieces))) == 200
    assert status(wire.talk(head + chunked())) == 422


def test_chunks_beyond_the_limit_are_413(wire: Wire) -> None:
    head = POST + b"Transfer-Encoding: chunked\r\n\r\n"
    answer = wire.talk(head, *[b"%x\r\n%s\r\n" % (50_000, bytes(50_000))] * 5)
    assert status(answer) == 413
    assert b"connection: close" in answer


@pytest.mark.parametrize("chunk", [b"xyz\r\nabc\r\n", b"-5\r\nabc\r\n", b"ffffffffffffffffff\r\nabc", b"5;\x00\r\nabc"])
def test_broken_chunks_are_400(wire: Wire, chunk: bytes) -> None:
    assert status(wire.talk(POST + CLOSE + b"Transfer-Encoding: chunked\r\n\r\n" + chunk, end=True)) == 400


def test_a_length_beyond_the_limit_is_413_before_a_byte_is_sent(wire: Wire) -> None:
    for length in (b"200001", b"9" * 18):
        answer = wire.talk(POST + b"Expect: 100-continue\r\nContent-Length: " + length + b"\r\n\r\n")
        assert status(answer) == 413
        assert b"100 Continue" not in answer


def test_a_client_that_expects_100_continue_gets_it(wire: Wire, images: list[bytes]) -> None:
    head = POST + CLOSE + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(images[0])
    with socket.create_connection(wire.address, timeout=30) as connection:
        connection.sendall(head)
        assert connection.recv(100).startswith(b"HTTP/1.1 100 Continue\r\n")
        connection.sendall(images[0])
        assert connection.recv(65_536).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize(
    "lengths",
    [
        b"Content-Length: -1\r\n",
        b"Content-Length: abc\r\n",
        b"Content-Length: 3\r\nContent-Length: 4\r\n",
        b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: " + b"9" * 40 + b"\r\n",
    ],
)
def test_lengths_that_lie_are_4xx(wire: Wire, lengths: bytes) -> None:
    assert 400 <= status(wire.talk(POST + CLOSE + lengths + b"\r\nabc", end=True)) < 500


@pytest.mark.parametrize("framing", [b"Content-Length: 90000\r\n", b"Transfer-Encoding: chunked\r\n"])
def test_a_slow_sender_is_408_and_frees_what_it_held(wire: Wire, framing: bytes) -> None:
    started = time.monotonic()
    answer = wire.talk(POST + framing + b"\r\n", b"3\r\nabc\r\n")
    assert status(answer) == 408
    assert b"slow_body" in answer
    assert b"connection: close" in answer
    assert time.monotonic() - started < 20


def test_bodies_that_are_held_are_bounded_together(wire: Wire, images: list[bytes]) -> None:
    head = POST + b"Content-Length: 190000\r\n\r\n" + bytes(180_000)
    with socket.create_connection(wire.address) as first, socket.create_connection(wire.address) as second:
        first.sendall(head)
        time.sleep(0.5)
        second.settimeout(30)
        second.sendall(head[:1000])
        answer = second.recv(65_536)
        assert status(answer) == 503
        assert b"retry-after: " in answer
        good = httpx.post(f"{wire.url}/invocations", content=images[0], headers={"content-type": "image/png"})
        assert good.status_code == 200


def test_a_half_closed_connection_gets_its_answer(wire: Wire, images: list[bytes]) -> None:
    head = POST + b"Content-Length: %d\r\n\r\n" % len(images[0])
    assert b"HTTP/1.1 200 OK" in wire.talk(head + images[0], end=True)  # after interim answers perhaps
    assert status(wire.talk(head + images[0][:-1], end=True)) == 400


def test_a_client_that_leaves_frees_its_place(wire: Wire) -> None:
    for _ in range(50):
        with socket.create_connection(wire.address) as connection:
            connection.sendall(POST + b"Content-Length: 5000\r\n\r\n" + bytes(1000))
    end = time.monotonic() + 20
    while wire.metric("serve_requests_in_flight") > 1 and time.monotonic() < end:
        time.sleep(0.1)
    assert wire.metric("serve_requests_in_flight") <= 1  # the one that asks


@pytest.mark.parametrize(
    "path",
    [
        b"/models/%2e%2e/invocations",
        b"/models/../../etc/passwd",
        b"/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd/invocations",
        b"/models/%00/invocations",
        b"/models/%ff/invocations",
        b"/models/%/invocations",
        b"/models/%zz/invocations",
        b"/models//invocations",
        b"//models/tiny/invocations",
        b"/models/tiny;x/invocations",
        b"/v2/models/..%2f..%2fx/infer",
        b"/v2/models/tiny/versions/%2e%2e/infer",
    ],
)
def test_path_tricks_are_404(wire: Wire, path: bytes) -> None:
    answer = wire.talk(POST.replace(b"/invocations", path, 1) + CLOSE + b"Content-Length: 3\r\n\r\nabc")
    assert status(answer) == 404
    assert b"passwd" not in answer


@pytest.mark.parametrize("path", ["/models/\xe9/invocations".encode("latin-1"), "/models/日本/invocations".encode()])
def test_a_path_that_is_not_ascii_is_4xx(wire: Wire, path: bytes) -> None:
    answer = wire.talk(POST.replace(b"/invocations", path, 1) + CLOSE + b"Content-Length: 3\r\n\r\nabc", end=True)
    assert status(answer) in (400, 404)
