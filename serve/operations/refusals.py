"""What a connection answers by itself, before there is a request that an application could answer."""

import json
from dataclasses import dataclass
from http import HTTPStatus


@dataclass(frozen=True)
class Refusal:
    """An answer of the connection's own.

    Attributes:
        status: HTTP's status.
        code: Short name, as in `serve.errors.STATUSES`.
        message: One line.
    """

    status: HTTPStatus
    code: str
    message: str

    def render(self) -> bytes:
        """Write the whole answer, head and body."""
        body = json.dumps({"error": {"code": self.code, "message": self.message}}).encode("ascii")
        more = "retry-after: 1\r\n" if self.status == HTTPStatus.SERVICE_UNAVAILABLE else ""
        head = (
            f"HTTP/1.1 {self.status.value} {self.status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n{more}connection: close\r\n\r\n"
        )
        return head.encode("ascii") + body


SLOW_HEAD = Refusal(HTTPStatus.REQUEST_TIMEOUT, "slow_head", "the request's head did not arrive in time")
LARGE_HEAD = Refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "large_head", "the request's head is too large")
BROKEN = Refusal(HTTPStatus.BAD_REQUEST, "bad_request", "the request is not HTTP/1.1")
PIPELINED = Refusal(HTTPStatus.BAD_REQUEST, "pipelined", "too many requests wait on one connection")
SHORT_BODY = Refusal(HTTPStatus.BAD_REQUEST, "short_body", "the connection ended before the request did")
CROWDED = Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "crowded", "too many open connections; try again later")
