"""The end of the server: not ready at once, what has begun is answered, what takes too long is cut."""

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from types import FrameType

import uvicorn

logger = logging.getLogger(__name__)

_EXIT_S = 15.0


class Draining:
    """Whether the server is on its way out; readiness, keep-alive and the server look at it.

    Attributes:
        began: True from the first SIGTERM or Ctrl-C on.
    """

    def __init__(self) -> None:
        self.began = False


class DrainingServer(uvicorn.Server):
    """uvicorn's server with an end of its own.

    The first SIGTERM or Ctrl-C makes the server not ready; after `grace_s`, for balancers to notice, nothing new is
    accepted, and open requests have `timeout_s` to finish. A second one ends the process at once.

    Args:
        config: uvicorn's, without a timeout of its own.
        draining: Set at the first signal.
        grace_s: Seconds for which new requests are still answered.
        timeout_s: Seconds that open requests may then take.
    """

    def __init__(self, config: uvicorn.Config, draining: Draining, *, grace_s: float, timeout_s: float) -> None:
        super().__init__(config)
        self._draining, self._grace_s, self._timeout_s = draining, grace_s, timeout_s
        self._closes = float("inf")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; at a second signal leave."""
        del frame
        if self._draining.began:
            logging.shutdown()
            os._exit(128 + sig)
        self._draining.began = True
        self._closes = time.monotonic() + self._grace_s
        logger.info("%s: not ready any more, finishing what has begun", signal.Signals(sig).name)

    async def on_tick(self, counter: int) -> bool:
        """Tell whether it is time to close, ten times a second."""
        if time.monotonic() >= self._closes:
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish open requests, cut what is open after the timeout, end the application."""
        timer = asyncio.get_running_loop().call_later(self._timeout_s, self._cut)
        guard = threading.Timer(self._timeout_s + _EXIT_S, _leave)
        guard.daemon = True
        guard.start()
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
            guard.cancel()

    def _cut(self) -> None:
        """Let what is open answer 503 at once; a second later its connections are gone."""
        tasks = list(self.server_state.tasks)
        if tasks:
            logger.warning("cut after %g s: %d open requests", self._timeout_s, len(tasks))
        for task in tasks:
            task.cancel()
        asyncio.get_running_loop().call_later(1 if tasks else 0, self._abort)

    def _abort(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _leave() -> None:
    """End a process that cannot end itself, since an engine or a library hangs."""
    logger.error("the server does not end by itself; leaving without its consent")
    logging.shutdown()
    os._exit(1)
