"""Work that blocks, done aside: off the event loop, in a thread that nobody waits for when the server ends."""

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


async def run_aside(function: Callable[[Unpack[Ts]], T], *arguments: *Ts) -> T:
    """Call `function` in a daemon thread of its own and wait for what it returns or raises.

    The loop's own pool of threads would be joined at the end: a registry that does not answer would hold up the
    shutdown by its timeout, a download by its length. Cancelled, this returns at once and the thread is left behind.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    threading.Thread(target=_call, args=(loop, done, function, arguments), name="aside", daemon=True).start()
    try:
        return await done
    finally:
        del done  # an error's traceback holds this frame: they would keep each other, and what was half loaded


def end_process(status: int) -> NoReturn:
    """Leave with `status`, whatever threads are left behind: a load that was not waited for, an engine that hangs.

    Such a thread may be inside native code. When the interpreter is taken down under it, it is unwound through frames
    that cannot be, and the process ends by an abort in place of its status.
    """
    if any(thread.daemon for thread in threading.enumerate()):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _call(
    loop: asyncio.AbstractEventLoop, done: asyncio.Future[Any], function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    settle, outcome = done.set_result, None
    try:
        outcome = function(*arguments)
    except BaseException as error:  # any: it is raised where it is waited for
        settle, outcome = done.set_exception, error
    with suppress(RuntimeError):  # the loop has ended: nobody waits
        loop.call_soon_threadsafe(_settle, done, settle, outcome)
    del done, settle, outcome  # likewise


def _settle(done: asyncio.Future[Any], settle: Callable[[Any], None], outcome: Any) -> None:
    if not done.done():
        settle(outcome)
