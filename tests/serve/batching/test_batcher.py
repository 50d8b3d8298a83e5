import asyncio
import gc
import logging
import random
import time
import weakref

import numpy as np
import pytest

from serve.batching.batcher import Batcher, BatchLimits
from serve.batching.turns import Turns
from serve.errors import DeadlineError, QueueFullError
from serve.operations.metrics import Metrics
from tests.serve.batching.stub_engine import Array, Engine, ask, until

pytestmark = pytest.mark.anyio


async def test_each_request_gets_its_own_rows_however_batches_are_cut(batcher: Batcher, engine: Engine) -> None:
    dice = random.Random(1)

    async def check(first: int) -> None:
        await asyncio.sleep(dice.random() * 0.02)
        values = [float(first + i) for i in range(dice.choice([1, 1, 1, 2, 7, 8, 9, 20]))]
        rows = await ask(batcher, *values)
        assert rows.tolist() == [[value, 2 * value] for value in values]

    engine.before = lambda _: time.sleep(0.001)
    for _ in range(4):
        await asyncio.gather(*(check(100 * i) for i in range(10)))
    sizes = [len(batch) for batch in engine.batches]
    assert max(sizes) == 8  # batches were formed, and none too large
    assert sum(sizes) < 4 * 10 * 20


async def test_the_next_batch_is_what_came_while_the_engine_was_busy(batcher: Batcher, engine: Engine) -> None:
    busy = await engine.shut(batcher)
    tasks = [asyncio.create_task(ask(batcher, i)) for i in range(11)]
    await until(lambda: batcher._queued == 11)
    engine.gate.set()
    await asyncio.gather(busy, *tasks)
    assert engine.batches == [[-1], list(range(8)), [8, 9, 10]]


async def test_a_lone_request_does_not_wait_for_company(engine: Engine, metrics: Metrics) -> None:
    batcher = Batcher(engine, BatchLimits(wait_s=600), metrics)
    async with asyncio.timeout(30):
        await ask(batcher, 1)
        await ask(batcher, 2)  # nor after one that has left
    await batcher.close()
    assert engine.batches == [[1], [2]]


async def test_an_idle_engine_waits_for_what_is_being_decoded(engine: Engine, metrics: Metrics) -> None:
    batcher = Batcher(engine, BatchLimits(wait_s=600), metrics)
    with batcher.reserve(1):  # still being decoded
        first = asyncio.create_task(ask(batcher, 1))
        await asyncio.sleep(0.05)
        assert engine.batches == []
        second = asyncio.create_task(ask(batcher, *range(2, 9)))  # fills the batch
        async with asyncio.timeout(30):
            await asyncio.gather(first, second)
    assert engine.batches == [[1, 2, 3, 4, 5, 6, 7, 8]]
    await until(lambda: batcher._is_idle)
    place = batcher.reserve(1)
    first = asyncio.create_task(ask(batcher, 1))
    await asyncio.sleep(0.05)
    second = asyncio.create_task(place.run(np.full((1, 3, 2, 2), 9, np.float32), time.monotonic() + 30))
    async with asyncio.timeout(30):  # nothing else is on its way: no need to be full
        await asyncio.gather(first, second)
    assert engine.batches[1:] == [[1, 9]]
    await batcher.close()


async def test_what_never_comes_is_waited_for_no_longer_than_said(batcher: Batcher, engine: Engine) -> None:
    with batcher.reserve(1):
        assert (await ask(batcher, 3)).tolist() == [[3, 6]]
    assert engine.batches == [[3]]


async def test_a_full_queue_refuses_at_once_and_says_when_to_try_again(engine: Engine, metrics: Metrics) -> None:
    batcher = Batcher(engine, BatchLimits(max_batch=4, max_queue=6), metrics)
    with batcher.reserve(6), pytest.raises(QueueFullError, match="the queue is full; try again later") as unmeasured:
        batcher.reserve(1)
    assert unmeasured.value.retry_after_s == 1
    batcher._seconds_per_image = 2.4
    with batcher.reserve(5):
        with pytest.raises(QueueFullError) as measured:
            batcher.reserve(2)
        batcher.reserve(1).__exit__(None, None, None)  # what fits is taken
    assert measured.value.retry_after_s == 12
    batcher._seconds_per_image = 1000
    with batcher.reserve(6), pytest.raises(QueueFullError) as hung:
        batcher.reserve(1)
    assert hung.value.retry_after_s == 60
    assert batcher.held == 0


async def test_the_rate_is_measured(batcher: Batcher, engine: Engine) -> None:
    engine.before = lambda images: time.sleep(0.02 * len(images))
    await ask(batcher, 1, 2, 3)
    assert batcher._seconds_per_image >= 0.02


async def test_room_is_given_back_when_decoding_fails(batcher: Batcher) -> None:
    with pytest.raises(ZeroDivisionError), batcher.reserve(3):
        raise ZeroDivisionError
    assert (batcher.held, batcher._coming) == (0, 0)


async def test_small_requests_pass_a_big_one_that_still_gets_its_half(batcher: Batcher, engine: Engine) -> None:
    busy = await engine.shut(batcher)
    order: list[str] = []

    async def send(name: str, *values: float) -> None:
        await ask(batcher, *values)
        order.append(name)

    big = asyncio.create_task(send("big", *range(100, 132)))
    await until(lambda: batcher._queued == 32)
    small = [asyncio.create_task(send(f"small {i}", i)) for i in range(12)]
    await until(lambda: batcher._queued == 44)
    engine.gate.set()
    await asyncio.gather(busy, big, *small)
    assert order[:12] == [f"small {i}" for i in range(12)]
    assert [len([v for v in batch if v >= 100]) for batch in engine.batches[1:]] == [4, 4, 4, 8, 8, 4]


async def test_more_images_than_the_place_has_room_for_are_our_own_fault(batcher: Batcher) -> None:
    with batcher.reserve(1) as place:
        for count in (0, 2):
            with pytest.raises(ValueError, match=f"got {count} images, this place has room for 1 to 1"):
                await place.run(np.zeros((count, 3, 2, 2), np.float32), time.monotonic() + 1)


async def test_a_hung_engine_shows_in_its_age_and_ends_nobody_elses_wait(
    engine: Engine, metrics: Metrics, caplog: pytest.LogCaptureFixture
) -> None:
    batcher = Batcher(engine, BatchLimits(), metrics)
    assert (batcher.is_alive, batcher.busy_s) == (True, 0)
    busy = await engine.shut(batcher)
    with pytest.raises(DeadlineError):
        await ask(batcher, 1, within=0.05)
    assert batcher.busy_s >= 0.05
    assert batcher.is_alive
    with caplog.at_level(logging.ERROR):
        await batcher.close(within_s=0.01)
    assert "did not end its batch within 0.01 s and is left behind" in caplog.text
    engine.gate.set()
    await busy


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_dead_thread_is_seen(metrics: Metrics) -> None:
    def end(_: Array) -> Array:
        raise SystemExit  # what a thread leaves by without a word

    batcher = Batcher(end, BatchLimits(), metrics)
    with pytest.raises(DeadlineError):
        await ask(batcher, 1, within=0.2)
    assert not batcher.is_alive
    await batcher.close()


async def test_closing_computes_what_is_queued_and_lets_the_model_go(metrics: Metrics) -> None:
    engine = Engine()
    batcher = Batcher(engine, BatchLimits(max_batch=2), metrics)
    busy = await engine.shut(batcher)
    tasks = [asyncio.create_task(ask(batcher, i)) for i in range(5)]
    await until(lambda: batcher._queued == 5)
    closing = asyncio.create_task(batcher.close())
    await asyncio.sleep(0)
    engine.gate.set()
    await asyncio.gather(busy, closing, *tasks)
    assert sum(map(len, engine.batches)) == 6
    with pytest.raises(RuntimeError, match="closed"):
        await ask(batcher, 1)
    gone = weakref.ref(engine)
    gc.disable()  # no cycle may keep it
    try:
        del engine, busy, tasks
        assert gone() is None
    finally:
        gc.enable()


async def test_batches_and_times_are_counted(batcher: Batcher, engine: Engine, metrics: Metrics) -> None:
    engine.before = lambda _: time.sleep(0.005)
    await asyncio.gather(ask(batcher, *range(12)), ask(batcher, 1))
    value = metrics.registry.get_sample_value
    assert value("serve_batch_images_sum") == 13
    assert value("serve_batch_images_count") == len(engine.batches)
    assert value("serve_stage_duration_seconds_count", {"stage": "queue"}) == 2
    assert value("serve_stage_duration_seconds_count", {"stage": "engine"}) == len(engine.batches)
    assert (value("serve_stage_duration_seconds_sum", {"stage": "engine"}) or 0) >= 0.005 * len(engine.batches)


async def test_models_that_share_a_device_take_turns(metrics: Metrics) -> None:
    turns, computing, most = Turns(), [0], [0]
    order: list[str] = []

    def build(name: str) -> Batcher:
        def compute(images: Array) -> Array:
            computing[0] += 1
            most[0] = max(most[0], computing[0])
            order.append(name)
            time.sleep(0.002)
            computing[0] -= 1
            return images[:, 0, 0]

        return Batcher(compute, BatchLimits(max_batch=1), metrics, turns)

    batchers = [build(name) for name in "ab"]
    await asyncio.gather(*(ask(batcher, *range(20)) for batcher in batchers))
    assert most == [1]
    assert "aaaa" not in "".join(order)[2:36]  # in turn, not one after the other
    assert "bbbb" not in "".join(order)[2:36]
    for batcher in batchers:
        await batcher.close()
