import asyncio
from collections.abc import Callable

import pytest

from serve.batching.batcher import BatchLimits
from serve.errors import NotReadyError, UnknownModelError
from serve.models.served import ServedModel, Shelf
from serve.operations.metrics import Metrics
from serve.predictor import Predictor

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def build(predictor: Predictor, metrics: Metrics) -> Callable[[str, str], ServedModel]:
    def build(name: str, version: str) -> ServedModel:
        named = Predictor(predictor.engine, predictor.card, name=name, version=version)
        return ServedModel(named, BatchLimits(max_batch=2), metrics)

    return build


async def test_names_are_known_before_their_models(build: Callable[..., ServedModel], metrics: Metrics) -> None:
    shelf = Shelf(["a", "b"], metrics)
    assert (shelf.names, shelf.default, shelf.models, shelf.is_ready) == (["a", "b"], "a", [], False)
    for name in (None, "a", "b"):
        with pytest.raises(NotReadyError, match="still being loaded") as told:
            shelf.find(name)
        assert told.value.retry_after_s == 5
    with pytest.raises(UnknownModelError, match="no such model here"):
        shelf.find("c")
    await shelf.put(build("b", "1"))
    assert (shelf.is_ready, shelf.find("b").predictor.version) == (False, "1")
    await shelf.put(build("a", "7"))
    assert shelf.is_ready
    assert [served.predictor.name for served in shelf.models] == ["a", "b"]
    assert shelf.find() is shelf.find("a") is shelf.find("a", "7")
    with pytest.raises(UnknownModelError, match="or not in that version"):
        shelf.find("a", "8")
    await shelf.close()


async def test_what_was_there_goes_after_its_last_request(build: Callable[..., ServedModel], metrics: Metrics) -> None:
    def info(version: str) -> float | None:
        labels = {"model": "a", "version": version, "engine": "eager"}
        return metrics.registry.get_sample_value("serve_model_info", labels)

    shelf = Shelf(["a"], metrics)
    first, second = build("a", "1"), build("a", "2")
    await shelf.put(first)
    with first.use(), first.batcher.reserve(1), first.use():
        putting = asyncio.create_task(shelf.put(second))
        await asyncio.sleep(0.02)
        assert shelf.find() is second  # from now on
        assert (info("1"), info("2")) == (None, 1)
        assert not putting.done()
        assert first.batcher.is_alive
        assert metrics.registry.get_sample_value("serve_queue_images", {"model": "a"}) == 1  # it counts until it goes
    await asyncio.wait_for(putting, 30)
    assert not first.batcher.is_alive
    assert shelf.is_ready
    await shelf.close()
    assert not shelf.is_ready


async def test_the_same_version_may_be_put_again(build: Callable[..., ServedModel], metrics: Metrics) -> None:
    shelf = Shelf(["a"], metrics)
    await shelf.put(build("a", "1"))
    await shelf.put(build("a", "1"))
    (sample,) = [sample for family in metrics.model_info.collect() for sample in family.samples]
    assert (sample.labels["version"], sample.value) == ("1", 1)
    await shelf.close()


async def test_a_hung_engine_shows_on_the_shelf(
    build: Callable[..., ServedModel], metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = Shelf(["a"], metrics)
    served = build("a", "1")
    await shelf.put(served)
    assert (shelf.is_alive, shelf.busy_s) == (True, 0)
    monkeypatch.setattr(type(served.batcher), "busy_s", 77.0)
    assert shelf.busy_s == 77.0
    monkeypatch.setattr(type(served.batcher), "is_alive", False)
    assert (shelf.is_alive, shelf.is_ready) == (False, False)
    await shelf.close()


async def test_a_model_warms_up_by_answering(build: Callable[..., ServedModel], metrics: Metrics) -> None:
    served = build("a", "1")
    await served.warm_up()
    assert metrics.registry.get_sample_value("serve_batch_images_sum") == 3
    assert served.batcher.held == 0
    await served.retire()
