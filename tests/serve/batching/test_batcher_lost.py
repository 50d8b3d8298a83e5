"""Requests that a batch loses: late, abandoned, or failed by the engine."""

import asyncio
import threading
import time

import numpy as np
import pytest

from serve.batching.batcher import Batcher, BatchLimits
from serve.errors import DeadlineError
from serve.operations.metrics import Metrics
from tests.serve.batching.stub_engine import Array, Engine, ask, until

pytestmark = pytest.mark.anyio


async def test_what_is_late_is_told_so_and_never_computed(batcher: Batcher, engine: Engine) -> None:
    busy = await engine.shut(batcher)
    with pytest.raises(DeadlineError, match="no answer within the time"):
        await ask(batcher, 7, within=0.01)
    assert batcher.held == 1  # the room is free before the engine is
    engine.gate.set()
    await busy
    await ask(batcher, 8)
    assert engine.batches == [[-1], [8]]


async def test_a_request_that_a_busy_loop_cannot_end_in_time_is_not_computed(batcher: Batcher, engine: Engine) -> None:
    busy = await engine.shut(batcher)
    late = asyncio.create_task(ask(batcher, 7, within=0.02))
    await until(lambda: batcher._queued == 1)
    time.sleep(0.05)
    engine.gate.set()
    end = time.monotonic() + 30
    while batcher._queued and time.monotonic() < end:
        time.sleep(0.001)
    with pytest.raises(DeadlineError):
        await late
    await busy
    assert engine.batches == [[-1]]


async def test_the_images_being_computed_at_a_deadline_are_late_too(batcher: Batcher, engine: Engine) -> None:
    engine.gate.clear()
    with pytest.raises(DeadlineError):
        await ask(batcher, 7, within=0.02)
    assert batcher.held == 0
    assert batcher.busy_s > 0


async def test_who_leaves_frees_its_room_and_is_not_computed(batcher: Batcher, engine: Engine) -> None:
    busy = await engine.shut(batcher)
    tasks = [asyncio.create_task(ask(batcher, i, i)) for i in range(3)]
    await until(lambda: batcher._queued == 6)
    tasks[1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[1]
    assert (batcher.held, batcher._queued) == (5, 4)
    engine.gate.set()
    await asyncio.gather(busy, tasks[0], tasks[2])
    assert engine.batches == [[-1], [0, 0, 2, 2]]


async def test_who_leaves_between_two_batches_frees_the_rest(batcher: Batcher, engine: Engine) -> None:
    engine.gate.clear()
    task = asyncio.create_task(ask(batcher, *range(20)))
    await until(engine.entered.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    engine.gate.set()
    await ask(batcher, 99)
    assert engine.batches == [list(range(8)), [99]]


async def test_a_failing_engine_fails_its_batch_alone(batcher: Batcher, engine: Engine) -> None:
    def fail(images: Array) -> None:
        if 5 in images[:, 0, 0, 0]:
            raise MemoryError("SECRET")

    engine.before = fail
    busy = await engine.shut(batcher)
    tasks = [asyncio.create_task(ask(batcher, i)) for i in range(9)]
    tasks.append(asyncio.create_task(ask(batcher, *range(10, 15))))
    await until(lambda: batcher._queued == 14)
    engine.gate.set()
    await busy
    got = await asyncio.gather(*tasks, return_exceptions=True)
    assert len(engine.batches[1]) == 8
    for failure in got[:8]:
        assert isinstance(failure, RuntimeError)
        assert str(failure) == "the engine failed (MemoryError)"
        assert isinstance(failure.__cause__, MemoryError)
    assert len({id(failure) for failure in got[:8]}) == 8  # one each: a traceback grows where it is raised
    assert isinstance(got[8], np.ndarray)
    assert isinstance(got[9], np.ndarray)
    assert batcher.is_alive


async def test_a_failed_part_fails_the_request_and_drops_the_rest(batcher: Batcher, engine: Engine) -> None:
    told = threading.Event()

    def fail(_: Array) -> None:
        if len(engine.batches) == 1:
            raise ZeroDivisionError
        assert told.wait(30)  # one more may have begun before the loop heard of the failure

    engine.before = fail
    with pytest.raises(RuntimeError, match="the engine failed"):
        await ask(batcher, *range(30))
    told.set()
    await ask(batcher, 99)
    assert engine.batches[-1] == [99]
    assert len(engine.batches) <= 3


async def test_a_row_that_is_not_finite_hurts_its_own_request_alone(batcher: Batcher, engine: Engine) -> None:
    busy = await engine.shut(batcher)
    tasks = [asyncio.create_task(ask(batcher, *values)) for values in ((1, 2), (3, np.nan), (np.inf,), (4,))]
    await until(lambda: batcher._queued == 6)
    engine.gate.set()
    await busy
    got = await asyncio.gather(*tasks, return_exceptions=True)
    assert len(engine.batches) == 2
    assert [str(failure) for failure in got[1:3]] == ["the model's probabilities are not finite"] * 2
    assert got[0].tolist() == [[1, 2], [2, 4]]  # type: ignore[union-attr]
    assert got[3].tolist() == [[4, 8]]  # type: ignore[union-attr]


async def test_an_engine_that_answers_too_few_rows_is_no_answer(metrics: Metrics) -> None:
    batcher = Batcher(lambda images: images[1:, 0, 0], BatchLimits(), metrics)
    with pytest.raises(RuntimeError, match="the engine failed") as failure:
        await ask(batcher, 1, 2)
    assert str(failure.value.__cause__) == "the engine answered 1 rows for 2 images"
    await batcher.close()
