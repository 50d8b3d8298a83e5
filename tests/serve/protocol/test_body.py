import asyncio
from collections.abc import Awaitable, Callable

import pytest
from starlette.requests import ClientDisconnect, Request

from serve.errors import MediaTypeError, QueueFullError, SlowBodyError, TooLargeError
from serve.protocol.body import BodyReader
from serve.protocol.error_reply import UNREAD
from serve.settings import Settings

SETTINGS = Settings(max_body_bytes=100, max_buffered_bytes=150, body_timeout_s=0.05)
FOREVER = b"..."


def build_request(*chunks: bytes, **headers: str) -> Request:
    """A request whose body comes in these chunks; after FOREVER nothing comes, after none the client leaves."""
    waiting = list(chunks)

    async def receive() -> dict[str, object]:
        if not waiting:
            return {"type": "http.disconnect"}
        chunk = waiting.pop(0)
        if chunk is FOREVER:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": chunk, "more_body": chunk != b""}

    fields = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "headers": fields}, receive)


async def read(reader: BodyReader, request: Request) -> bytes:
    async with reader.read(request) as body:
        assert reader.held == len(body)
        assert not request.scope[UNREAD]
        return body


@pytest.mark.parametrize("chunks", [(b"",), (b"abc", b""), (b"a",) * 100 + (b"",), (bytes(100), b"")])
def test_a_body_within_the_limits_is_read_whole(chunks: tuple[bytes, ...]) -> None:
    reader = BodyReader(SETTINGS)
    assert asyncio.run(read(reader, build_request(*chunks))) == b"".join(chunks)
    assert reader.held == 0


REFUSED: list[tuple[Callable[[], Request], type[Exception], str | None]] = [
    (lambda: build_request(bytes(101), b""), TooLargeError, "more than 100 bytes"),
    (lambda: build_request(*[bytes(30)] * 4, b""), TooLargeError, "more than 100 bytes"),
    (lambda: build_request(FOREVER, content_length="101"), TooLargeError, "more than 100 bytes"),
    (lambda: build_request(FOREVER, content_length="9" * 30), TooLargeError, "more than 100 bytes"),
    (lambda: build_request(bytes(99), FOREVER), SlowBodyError, r"did not arrive within 0\.05 s"),
    (lambda: build_request(FOREVER, content_length="9"), SlowBodyError, r"did not arrive within 0\.05 s"),
    (lambda: build_request(FOREVER, content_encoding="gzip"), MediaTypeError, "content encoding"),
    (lambda: build_request(bytes(9)), ClientDisconnect, None),
]


@pytest.mark.parametrize(("request_", "kind", "message"), REFUSED)
def test_a_body_beyond_the_limits_is_refused_and_let_go(
    request_: Callable[[], Request], kind: type[Exception], message: str | None
) -> None:
    reader, request = BodyReader(SETTINGS), request_()
    with pytest.raises(kind, match=message):
        asyncio.run(read(reader, request))
    assert reader.held == 0
    assert request.scope[UNREAD], "the connection is closed after the answer"


def run_beside(reader: BodyReader, other: Callable[[], Awaitable[object]]) -> None:
    """Hold a body of 90 bytes while `other` runs."""

    async def both() -> None:
        async with reader.read(build_request(bytes(90), b"")):
            await other()

    asyncio.run(both())


@pytest.mark.parametrize("request_", [build_request(bytes(61), b""), build_request(FOREVER, content_length="61")])
def test_all_bodies_together_are_bounded(request_: Request) -> None:
    reader = BodyReader(SETTINGS)

    async def other() -> None:
        with pytest.raises(QueueFullError, match="all requests together") as caught:
            await read(reader, request_)
        assert caught.value.retry_after_s >= 1
        assert reader.held == 90

    run_beside(reader, other)
    assert reader.held == 0


def test_the_last_byte_of_room_may_be_taken() -> None:
    reader = BodyReader(SETTINGS)

    async def other() -> None:
        async with reader.read(build_request(bytes(60), b"")):
            assert reader.held == 150

    run_beside(reader, other)


def test_a_cancelled_read_lets_go() -> None:
    reader = BodyReader(SETTINGS)

    async def cancel() -> None:
        task = asyncio.create_task(read(reader, build_request(bytes(9), FOREVER)))
        await asyncio.sleep(0.01)
        assert reader.held == 9
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert reader.held == 0
