"""A registry or a disk that fails while an alias is followed."""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import pytest

from serve.models import registry
from serve.models.load import Loader
from tests.serve.models.stand import OURS, Stand

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning"),
]


async def test_an_outage_harms_nothing_and_is_said_once(
    registered_model: Any, other_bundle: Path, stand: Stand, caplog: pytest.LogCaptureFixture
) -> None:
    before = mlflow.get_tracking_uri()
    registered_model.point(registered_model.add(other_bundle))
    with caplog.at_level(logging.INFO, "serve"), socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        mlflow.set_tracking_uri(f"http://127.0.0.1:{closed.getsockname()[1]}")
        try:
            for _ in range(3):
                await stand.follower.look()
                assert stand.version == "1"
        finally:
            mlflow.set_tracking_uri(before)
        assert stand.count("unreachable") == 3
        await stand.follower.look()
        assert stand.version == "2"
    lines = [(r.levelname, r.getMessage()) for r in caplog.records if r.name.startswith("serve")]
    assert [level for level, _ in lines] == ["WARNING", "INFO", "INFO"]
    assert "no MLflow server answers at http://127.0.0.1" in lines[0][1]
    assert "version 1 keeps serving" in lines[0][1]
    assert "the registry answers again" in lines[2][1]


async def test_an_outage_during_the_download_refuses_nothing(
    registered_model: Any, other_bundle: Path, stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered_model.point(registered_model.add(other_bundle))
    with monkeypatch.context() as patch:

        def fail(**_: object) -> str:
            raise mlflow.exceptions.MlflowException("503 Service Unavailable")

        patch.setattr(registry, "download_artifacts", fail)
        await stand.follower.look()
    assert (stand.version, stand.shelf.refused, stand.count("unreachable")) == ("1", {}, 1)
    await stand.follower.look()
    assert stand.version == "2"


async def test_a_full_disk_refuses_nothing(
    registered_model: Any,
    other_bundle: Path,
    stand: Stand,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    registered_model.point(registered_model.add(other_bundle))
    with monkeypatch.context() as patch:

        def fail(*_: object) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(Loader, "_open", fail)
        await stand.follower.look()
        await stand.follower.look()
    assert (stand.version, stand.shelf.refused) == ("1", {})
    assert caplog.text.count("No space left on device; version 1 keeps serving") == 1
    await stand.follower.look()
    assert stand.version == "2"


async def test_a_registry_that_hangs_holds_up_neither_requests_nor_the_end(
    registered_model: Any, run_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    before = mlflow.get_tracking_uri()
    async with asyncio.timeout(60):
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()  # takes connections, answers none
            running = run_server(registered_model.uri, poll_interval_s=0.01)
            server = await running.__aenter__()
            await server.serves("1")
            mlflow.set_tracking_uri(f"http://127.0.0.1:{silent.getsockname()[1]}")
            try:
                connection, _ = await asyncio.get_running_loop().run_in_executor(None, silent.accept)
                for _ in range(3):
                    assert await server.ask() == (200, "1", OURS)
                ended = asyncio.create_task(running.__aexit__(None, None, None))
                await ended
                assert [t.name for t in threading.enumerate()].count("aside") == 1  # the poll still hangs: left behind
            finally:
                mlflow.set_tracking_uri(before)
            connection.close()
    for thread in threading.enumerate():
        if thread.name == "aside":
            thread.join(30)
