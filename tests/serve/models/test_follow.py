"""An alias that moves under load, to sound versions and to broken ones."""

import asyncio
import gc
import logging
import re
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from serve.predictor import Predictor
from tests.serve.models.stand import OTHERS, OURS, Stand, ended

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning"),
]


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
