"""Whose turn it is to compute: two forward passes at once on one device only slow each other down."""

import threading
from collections import deque
from types import TracebackType

_TURNS: dict[str, "Turns"] = {}
_ADDING = threading.Lock()


class Turns:
    """A lock that is handed on in the order of asking. Python's own may go to the same thread for ever."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._asking: deque[threading.Lock] = deque()
        self._is_taken = False

    def __enter__(self) -> None:
        with self._guard:
            if not self._is_taken:
                self._is_taken = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._asking.append(turn)
        turn.acquire()  # released by whoever leaves before us

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        with self._guard:
            if self._asking:
                self._asking.popleft().release()  # still taken: now by the next
            else:
                self._is_taken = False


def turns_on(device: str) -> Turns:
    """Return what all models of this process that compute on `device` share."""
    with _ADDING:
        return _TURNS.setdefault(device, Turns())
