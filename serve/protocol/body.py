"""Bodies, read within limits: the bytes of one, the bytes of all that are held, and the time one takes to arrive."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.datastructures import Headers
from starlette.requests import Request

from serve.errors import MediaTypeError, QueueFullError, SlowBodyError, TooLargeError
from serve.protocol.error_reply import UNREAD
from serve.settings import Settings


class BodyReader:
    """Reads bodies, and counts the bytes of all that are held.

    Attributes:
        held: Bytes of the bodies that are read or being read, until their requests end.
    """

    def __init__(self, settings: Settings) -> None:
        self.held = 0
        self._max_bytes = settings.max_body_bytes
        self._max_held = settings.max_buffered_bytes
        self._timeout_s = settings.body_timeout_s

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """Read a body and hold it for the length of the block. What its head gives away is refused unread.

        Raises:
            MediaTypeError: If it is compressed.
            QueueFullError: If the bodies of all requests would be more than `max_buffered_bytes`.
            TooLargeError: If it has more than `max_body_bytes`.
            SlowBodyError: If it takes longer than `body_timeout_s` to arrive.
        """
        request.scope[UNREAD] = True
        if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise MediaTypeError("a body with a content encoding is not read here; send it as it is (identity)")
        held = 0
        try:
            self._check_room(_read_length(request.headers), 0)
            body = bytearray()
            try:
                async with asyncio.timeout(self._timeout_s):
                    async for chunk in request.stream():
                        self._check_room(len(chunk), held)
                        held += len(chunk)
                        self.held += len(chunk)
                        body += chunk
            except TimeoutError as error:
                raise SlowBodyError(f"the body did not arrive within {self._timeout_s:g} s") from error
            request.scope[UNREAD] = False
            whole = bytes(body)
            del body
            yield whole
        finally:
            self.held -= held

    def _check_room(self, more: int, before: int) -> None:
        """Check `more` bytes of a body of which `before` are held already."""
        if before + more > self._max_bytes:
            raise TooLargeError(f"the body has more than {self._max_bytes} bytes")
        if self.held + more > self._max_held:
            raise QueueFullError("the bodies of all requests together are too large now; try again later")


def _read_length(headers: Headers) -> int:
    """Read how long a body says it is; 0 if it does not say."""
    length = headers.get("content-length", "")
    return int(length[:20]) if length.isascii() and length.isdigit() else 0
