"""A client that leaves: what it asked for is not worth computing any more."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

T = TypeVar("T")


async def answer_or_leave(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Wait for `work`, but cancel it when the client disconnects.

    Args:
        request: The request, its body read to the end: from then on the server has nothing more to tell of it than
            that the client is gone.
        work: What to wait for; it runs in the task that calls.

    Returns:
        What `work` returns.

    Raises:
        ClientDisconnect: If the client leaves first.
    """
    task = asyncio.current_task()
    assert task is not None
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        task.cancel()

    watching = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if is_gone and task.cancelling() == 1:  # above 1 someone else wants us to end too
            raise ClientDisconnect from None
        raise
    finally:
        watching.cancel()
        if is_gone:
            task.uncancel()
