"""A client that leaves before its answer, over a real connection and alone."""

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn
from starlette.requests import ClientDisconnect, Request

from serve.app import create_app
from serve.batching.leaving import answer_or_leave
from serve.predictor import Predictor
from serve.settings import Settings

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_so():
            await asyncio.sleep(0.002)


def write_request(image: bytes) -> bytes:
    head = f"POST /invocations HTTP/1.1\r\nhost: x\r\ncontent-type: image/png\r\ncontent-length: {len(image)}\r\n"
    return head.encode() + b"connection: close\r\n\r\n" + image


@pytest.mark.parametrize("how", ["close", "reset", "half"])
async def test_a_closed_socket_frees_its_place_and_is_no_fault(
    settings: Settings,
    predictor: Predictor,
    images: list[bytes],
    caplog: pytest.LogCaptureFixture,
    shut_engines: Any,
    how: str,
) -> None:
    app = create_app(settings, predictor)

    def count(sample: str, **labels: str) -> float:
        return app.state.metrics.registry.get_sample_value(sample, labels) or 0.0

    def held() -> float:
        return count("serve_queue_images", model=predictor.name)

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await until(lambda: server.started)
        address = listener.getsockname()
        reader, writer = await asyncio.open_connection(*address)
        writer.write(write_request(images[1]))
        await until(shut_engines.entered.is_set)
        _, leaving = await asyncio.open_connection(*address)
        leaving.write(write_request(images[0]))
        await until(lambda: held() == 2)
        if how == "close":
            leaving.close()
        elif how == "reset":
            leaving.transport.abort()
        else:
            leaving.write_eof()
        await until(lambda: held() == 1)
        labels = {"route": "/invocations", "model": predictor.name, "status": "499"}
        await until(lambda: count("serve_requests_total", **labels) == 1)
        shut_engines.set()
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")
        writer.close()
        leaving.close()
        assert count("serve_batch_images_sum") == 1  # what the other had asked for was never computed
        server.should_exit = True
        await serving
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


class Client:
    """A request's `receive`: tells that the client is gone once `leave` is called."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.request = Request({"type": "http"}, self.receive)

    async def receive(self) -> dict[str, str]:
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def wait(event: asyncio.Event) -> str:
    await event.wait()
    return "answer"


async def test_the_answer_comes_if_the_client_stays() -> None:
    client, event = Client(), asyncio.Event()
    event.set()
    before = asyncio.all_tasks()
    assert await answer_or_leave(client.request, wait(event)) == "answer"
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before  # nobody goes on watching


async def test_an_error_of_the_work_is_its_own() -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await answer_or_leave(Client().request, fail())


async def test_leaving_cancels_the_work_and_leaves_the_task_as_it_was() -> None:
    client, never = Client(), asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, client.gone.set)
    with pytest.raises(ClientDisconnect):
        await answer_or_leave(client.request, wait(never))
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    with pytest.raises(TimeoutError):  # a task that still counts as cancelled would not end by TimeoutError
        await asyncio.wait_for(never.wait(), 0.01)


async def test_the_end_of_the_server_wins_over_a_client_that_leaves_at_the_same_time() -> None:
    client, never = Client(), asyncio.Event()
    task = asyncio.create_task(answer_or_leave(client.request, wait(never)))
    await asyncio.sleep(0.01)
    client.gone.set()
    await asyncio.sleep(0)  # the watcher is woken; it cancels in the same turn as we do
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_deadline_around_it_stays_a_deadline() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await answer_or_leave(Client().request, wait(asyncio.Event()))
