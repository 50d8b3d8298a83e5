"""The layer before the routes: who may ask, and how often."""

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from serve.errors import KeyRefusedError, RetryError
from serve.operations.answers import answer_mistake
from serve.operations.current import CURRENT
from serve.operations.keys import KeyRing, find_key
from serve.operations.rates import RateLimiter, client_of
from serve.protocol.error_reply import leave_unread

PROBES = frozenset({"/ping", "/health", "/ready", "/v2/health/live", "/v2/health/ready"})
"""Paths that need no key and are not counted, as kubelets and balancers ask them."""

REFUSAL = "serve.refusal"
"""Key of a request's scope under which the connection leaves the RetryError that the request is to be refused by."""


class Gate:
    """ASGI middleware that refuses before anything of the body is read.

    A refused key counts against its address's rate, so keys cannot be guessed at any pace.

    Args:
        app: What answers.
        keys: The API keys; None asks for none.
        rates: The rate that one client may have; None for any.
        check_room: Called with the scope of a POST; raises QueueFullError where the model that it asks has no room:
            under an overload most requests end here, so this is cheap.
    """

    def __init__(
        self, app: ASGIApp, keys: KeyRing | None, rates: RateLimiter | None, check_room: Callable[[Scope], None]
    ) -> None:
        self._app, self._keys, self._rates, self._check_room = app, keys, rates, check_room

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401, 429 or 503, or let the request pass."""
        if scope["type"] == "http" and scope["path"] not in PROBES:
            try:
                self._check(scope)
            except (KeyRefusedError, RetryError) as error:
                leave_unread(scope)
                await answer_mistake(scope, error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        if REFUSAL in scope:
            raise scope[REFUSAL]
        name = refused = None
        if self._keys is not None:
            try:
                name = self._keys.check(find_key(scope["headers"]))
            except KeyRefusedError as error:
                refused = error
            current = CURRENT.get()
            if current is not None and name:
                current.key = name
        if self._rates is not None:
            self._rates.hit(f"key {name}" if name else client_of(scope))
        if refused:
            raise refused
        if scope["method"] == "POST":
            self._check_room(scope)
