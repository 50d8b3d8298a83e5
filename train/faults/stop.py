"""What asks a run to stop: SIGTERM, Ctrl-C, a closed terminal, a launcher that is gone. The work goes on to a good end.

While steps are taken a request is only noted: all ranks agree on the step after which they save and leave. At any other
time, or if a signal comes again, `Stopped` is raised at once. One record for the process, as signals are.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from train.errors import Stopped

_SIGNALS = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C (SIGINT)", signal.SIGHUP: "a closed terminal (SIGHUP)"}
_ECHO_S = 3.0  # a launcher may pass on what the terminal has sent already

_asked: str | None = None
_seen: float | None = None  # when the main thread saw the first signal, which may be long after it has come
_graceful = False
_granted = False
_pipe: tuple[int, int] | None = None


@contextmanager
def listening() -> Iterator[None]:
    """Take over the signals that ask for a stop while the block runs, in the main thread.

    What the user has set to be ignored stays so, as nohup does with SIGHUP.
    """
    global _pipe, _asked, _seen, _granted
    pipe = _pipe = os.pipe()
    for end in pipe:
        os.set_blocking(end, False)
    before = signal.set_wakeup_fd(pipe[1], warn_on_full_buffer=False)
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, handler in handlers.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, _on_signal)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before)
        _pipe = _asked = _seen = None
        _granted = False
        for end in pipe:
            os.close(end)


def request(reason: str) -> None:
    """Ask for a stop, from any thread; the first reason stays."""
    global _asked
    _asked = _asked or reason


def requested() -> str | None:
    """Return who asked for a stop, None if nobody did."""
    return _asked


def grant() -> None:
    """Say that all ranks save and leave now, as was asked."""
    global _granted
    _granted = True


def granted() -> bool:
    """Say whether the stop that was asked for is under way."""
    return _granted


def unheard() -> str | None:
    """Return a signal that has arrived while the main thread is inside a call and cannot see it; from any thread."""
    pipe = _pipe
    if pipe is None:
        return None
    try:
        numbers = os.read(pipe[0], 64)
    except OSError:  # nothing there, or closed meanwhile
        return None
    return next((name for number, name in _SIGNALS.items() if number in numbers), None)


@contextmanager
def graceful() -> Iterator[None]:
    """Let a stop wait, while the block runs, for the end of a step; one asked for earlier waits too.

    Raises:
        Stopped: At the end, if a stop was asked for when no step was left to agree on it.
    """
    global _graceful
    _graceful = True
    try:
        yield
    finally:
        _graceful = False
    if _asked is not None:
        raise Stopped(_asked)


def _on_signal(number: int, _frame: FrameType | None) -> None:
    global _seen
    now = time.monotonic()
    again = _seen is not None and now - _seen > _ECHO_S
    _seen = _seen or now
    request(_SIGNALS[signal.Signals(number)])
    if not _graceful or again:
        raise Stopped(f"{requested()}{', twice' if again else ''}")


def ignore() -> None:
    """Let no signal disturb what is left to do, where they were listened to."""
    for number in _SIGNALS if _pipe else ():
        signal.signal(number, signal.SIG_IGN)
