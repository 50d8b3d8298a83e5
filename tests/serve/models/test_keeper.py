"""The start: listening before loading, ready when all is warm, and what ends it."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serve.app import create_app
from serve.errors import LocateError
from serve.settings import Settings
from zoo.errors import BundleError

pytestmark = pytest.mark.anyio


async def until_ready(running: Any) -> None:
    async with asyncio.timeout(60):
        while (await running.client.get("/ready")).status_code != 200:
            await asyncio.sleep(0.01)


async def test_it_answers_while_it_loads_and_is_ready_once_every_model_has_answered(
    bundle: Path, other_bundle: Path, run_server: Callable[..., Any], shut_engines: threading.Event
) -> None:
    async with run_server(str(bundle), str(other_bundle)) as server:
        await asyncio.sleep(0.3)
        assert (await server.client.get("/health")).status_code == 200
        for path in ("/ready", "/version", "/v2/health/ready"):
            assert (await server.client.get(path)).status_code == 503, path
        answer = await server.client.post("/invocations", content=b"x", headers={"content-type": "image/png"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert answer.json()["error"]["code"] == "not_ready"
        unknown = await server.client.post("/models/nothing/invocations", content=b"x")
        assert unknown.status_code == 404
        shut_engines.set()
        await until_ready(server)
        assert (await server.ask())[2] == {"日本 語", "é", "ash"}
        names = [model["name"] for model in (await server.client.get("/version")).json()["models"]]
        assert names == ["tiny", "other"]


async def test_a_warm_model_has_answered_one_image_and_a_full_batch(
    bundle: Path, run_server: Callable[..., Any]
) -> None:
    async with run_server(str(bundle), max_batch=5) as running:
        await until_ready(running)
        assert running.count("serve_batch_images_count") == 2
        assert running.count("serve_batch_images_sum") == 6
        labels = {"model": "tiny", "version": "local", "engine": "eager"}
        assert running.count("serve_model_info", **labels) == 1


@pytest.mark.usefixtures("shut_engines")
async def test_leaving_while_it_loads_ends_at_once(bundle: Path, run_server: Callable[..., Any]) -> None:
    async with asyncio.timeout(30), run_server(str(bundle)) as running:
        assert (await running.client.get("/ready")).status_code == 503


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (lambda path: (path / "card.json").unlink(), LocateError, "no bundle here"),
        (lambda path: (path / "golden.safetensors").write_bytes(b""), BundleError, "golden.safetensors"),
    ],
)
async def test_a_model_that_cannot_be_loaded_at_the_start_is_told(
    bundle: Path, other_bundle: Path, tmp_path: Path, fault: Callable[[Path], None], kind: type, message: str
) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    for file in other_bundle.iterdir():
        (bad / file.name).write_bytes(file.read_bytes())
    fault(bad)
    failure: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
    ready: list[Any] = []
    settings = Settings(model_uri=(str(bundle), str(bad)), threads=1)
    app = create_app(settings, on_ready=ready.append, on_failure=failure.set_result)
    async with asyncio.timeout(60), app.router.lifespan_context(app):
        error = await failure
    assert isinstance(error, kind)
    assert message in str(error)
    assert ready == []


@pytest.mark.parametrize(
    ("uris", "message"),
    [
        (("models:/a@x", "models:/a/3"), "models:/a@x and models:/a/3 would both be called 'a': one server has one"),
        (("some/a", "models:/a@x"), "some/a and models:/a@x would both be called 'a'"),
        (("models:/a@x", "models:/b"), "models:/b: wanted is models:/NAME@ALIAS"),
    ],
)
def test_uris_that_do_not_go_together_are_told_before_anything_is_loaded(uris: tuple[str, ...], message: str) -> None:
    with pytest.raises(LocateError, match=message):
        create_app(Settings(model_uri=uris))
