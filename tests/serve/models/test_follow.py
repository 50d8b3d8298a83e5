"""An alias that moves under load, to sound versions and to broken ones, and a registry that goes away."""

import asyncio
import gc
import logging
import re
import socket
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow.tracking import MlflowClient

from serve.models import registry
from serve.models.follow import Follower
from serve.models.load import Loader
from serve.models.locate import FoundVersion, parse_uri
from serve.models.served import Shelf
from serve.operations.metrics import Metrics
from serve.predictor import Predictor
from serve.settings import Settings

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning"),
]

OURS, OTHERS = frozenset({"日本 語", "é", "ash"}), frozenset({"cat", "dog"})


class Stand:
    """A follower with its shelf, looked through by hand."""

    def __init__(self, uri: str, folder: Path) -> None:
        self.metrics = Metrics()
        self.uri = parse_uri(uri)
        self.shelf = Shelf([self.uri.name], self.metrics)
        self.loader = Loader(Settings(model_uri=(uri,), threads=1), self.metrics, folder)

    async def start(self) -> "Stand":
        served, found = await self.loader.load(self.uri)
        await self.shelf.put(served)
        self.follower = Follower(self.uri, found, self.shelf, self.loader, self.metrics)
        return self

    @property
    def version(self) -> str:
        return self.shelf.find().predictor.version

    def count(self, outcome: str) -> float:
        labels = {"model": self.uri.name, "outcome": outcome}
        return self.metrics.registry.get_sample_value("serve_reloads_total", labels) or 0.0


async def ended(name: str, but: int = 0) -> None:
    """Wait until only so many threads of this name are left."""
    async with asyncio.timeout(30):
        while [thread.name for thread in threading.enumerate()].count(name) != but:
            await asyncio.sleep(0.01)


@pytest.fixture
async def stand(registered_model: Any, tmp_path: Path) -> Any:
    (tmp_path / "downloads").mkdir()
    stand = await Stand(registered_model.uri, tmp_path / "downloads").start()
    yield stand
    await stand.shelf.close()
    assert list((tmp_path / "downloads").iterdir()) == []  # disk is bounded: nothing stays once it is loaded


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The versions that were downloaded."""
    fetched: list[str] = []
    real = registry.fetch_version

    def fetch(uri: Any, found: FoundVersion, into: Path) -> Any:
        fetched.append(found.version)
        return real(uri, found, into)

    monkeypatch.setattr(registry, "fetch_version", fetch)
    return fetched


async def test_aliases_move_under_load_and_no_request_fails(
    registered_model: Any, other_bundle: Path, run_server: Callable[..., Any]
) -> None:
    versions = {"1": OURS, registered_model.add(other_bundle): OTHERS}
    answers: set[tuple[int, str, frozenset[str]]] = set()
    async with run_server(registered_model.uri, max_batch=4) as running:
        await running.serves("1")
        stop = asyncio.Event()

        async def load() -> int:
            count = 0
            while not stop.is_set():
                answers.add(await running.ask())
                count += 1
            return count

        clients = [asyncio.create_task(load()) for _ in range(8)]
        for i in range(12):
            version = "12"[(i + 1) % 2]
            registered_model.point(version)
            await running.serves(version)
        stop.set()
        counts = await asyncio.gather(*clients)
        assert running.count("serve_reloads_total", model=registered_model.name, outcome="swapped") == 12
        assert running.count("serve_queue_images", model=registered_model.name) == 0
    assert min(counts) > 12
    assert answers == {(200, version, labels) for version, labels in versions.items()}
    await ended("engine")
    await ended("aside")


async def test_a_request_ends_with_the_version_that_it_began_with(
    registered_model: Any, other_bundle: Path, run_server: Callable[..., Any], shut_engines: threading.Event
) -> None:
    registered_model.add(other_bundle)
    registered_model.point("2")
    shut_engines.set()
    async with run_server(registered_model.uri) as running:
        await running.serves("2")
        shut_engines.clear()
        early = asyncio.create_task(running.ask())
        await asyncio.sleep(0.1)  # it is decoded by version 2 and computed
        registered_model.point("1")
        await asyncio.sleep(0.1)  # version 1 is loaded meanwhile
        assert not early.done()
        shut_engines.set()
        assert await early == (200, "2", OTHERS)
        await running.serves("1")
        assert await running.ask() == (200, "1", OURS)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("flipped byte", r"^model\.safetensors: damaged, it is not the file that was written with the bundle"),
        ("other answer", r"^golden\.safetensors: the (engine|logits of engine|model).* differ"),
        ("newer format", r"^card\.json: format_version 99 is newer than \d, the newest known here"),
        ("no model.onnx", r"no model\.onnx|model\.onnx: missing"),
        ("no card", r"version 2 holds no bundle of ours"),
    ],
)
async def test_a_broken_version_is_refused_once_and_loudly(
    registered_model: Any,
    damage: Callable[[str], Path],
    stand: Stand,
    downloads: list[str],
    caplog: pytest.LogCaptureFixture,
    kind: str,
    reason: str,
) -> None:
    registered_model.point(registered_model.add(damage(kind)))
    with caplog.at_level(logging.INFO, "serve"):
        for _ in range(3):
            await stand.follower.look()
    refusal = stand.shelf.refused[registered_model.name]
    assert refusal.version == "2"
    assert re.search(reason, refusal.reason), refusal.reason
    assert "/tmp" not in refusal.reason
    (line,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert line.levelname == "ERROR"
    assert f"{registered_model.name}: version 2 is refused, version 1 keeps serving: " in line.getMessage()
    assert "\n" not in line.getMessage()
    assert line.exc_info is None
    assert downloads == ["2"]  # not at each look
    assert (stand.count("refused"), stand.count("swapped"), stand.version) == (1, 0, "1")


async def test_rollback_clears_a_refusal_and_another_move_tries_again(
    registered_model: Any, damage: Callable[[str], Path], other_bundle: Path, stand: Stand, downloads: list[str]
) -> None:
    registered_model.point(registered_model.add(damage("flipped byte")))
    await stand.follower.look()
    registered_model.point("1")
    await stand.follower.look()
    assert stand.shelf.refused == {}
    assert (downloads, stand.version) == (["2"], "1")  # what answers was not loaded again
    registered_model.point("2")
    await stand.follower.look()
    assert downloads == ["2", "2"]
    assert stand.shelf.refused[registered_model.name].version == "2"
    registered_model.point(registered_model.add(other_bundle))
    await stand.follower.look()
    assert (stand.version, stand.shelf.refused) == ("3", {})
    registered_model.point("1")
    await stand.follower.look()
    assert stand.version == "1"
    assert (stand.count("refused"), stand.count("swapped")) == (2, 2)


async def test_a_fault_of_the_engine_is_refused_without_its_words(
    registered_model: Any, stand: Stand, bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("SECRET")

    registered_model.point(registered_model.add(bundle))
    monkeypatch.setattr(Predictor, "compute", fail)
    await stand.follower.look()
    assert stand.shelf.refused[registered_model.name].reason == "it fails here (RuntimeError); see the server's log"
    assert "SECRET" in caplog.text  # with its trace, for whoever mends it
    await ended("engine", but=1)


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


async def test_what_is_deleted_while_it_is_served_goes_on(
    registered_model: Any, stand: Stand, bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = MlflowClient()
    client.delete_registered_model_alias(registered_model.name, "champion")
    await stand.follower.look()
    await stand.follower.look()
    client.delete_registered_model(registered_model.name)
    await stand.follower.look()
    await stand.follower.look()
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 2
    assert "has no alias 'champion'" in warnings[0]
    assert f"no registered model '{registered_model.name}'" in warnings[1]
    assert all(warning.endswith("; version 1 keeps serving") for warning in warnings)
    assert (stand.version, stand.count("unreachable")) == ("1", 0)
    client.create_registered_model(registered_model.name)
    registered_model.point(registered_model.add(bundle))  # version 1 once more, but another
    await stand.follower.look()
    assert stand.count("swapped") == 1


async def test_pinned_it_stays_with_its_version(
    registered_model: Any, other_bundle: Path, run_server: Callable[..., Any]
) -> None:
    async with run_server(registered_model.uri, pin=True) as running:
        await running.serves("1")
        registered_model.point(registered_model.add(other_bundle))
        await asyncio.sleep(0.3)  # a dozen looks, if there were any
        assert await running.ask() == (200, "1", OURS)


async def test_thirty_swaps_leave_one_model_in_memory(registered_model: Any, other_bundle: Path, stand: Stand) -> None:
    registered_model.add(other_bundle)
    seen = [weakref.ref(stand.shelf.find().predictor.engine)]
    gc.disable()  # the memory goes with the last request, not with the next collection
    try:
        for i in range(30):
            registered_model.point("21"[i % 2])
            await stand.follower.look()
            seen.append(weakref.ref(stand.shelf.find().predictor.engine))
            assert [found() is not None for found in seen] == [False] * (i + 1) + [True]
    finally:
        gc.enable()
    await ended("engine", but=1)
    series = [sample for family in stand.metrics.model_info.collect() for sample in family.samples]
    assert [(sample.labels["version"], sample.value) for sample in series] == [("1", 1)]
