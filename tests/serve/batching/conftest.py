import pytest

from serve.batching.batcher import Batcher, BatchLimits
from serve.operations.metrics import Metrics
from tests.serve.batching.stub_engine import Engine


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
async def batcher(engine: Engine, metrics: Metrics) -> object:
    batcher = Batcher(engine, BatchLimits(max_batch=8, wait_s=0.001, max_queue=200), metrics)
    yield batcher
    engine.gate.set()
    await batcher.close()
    assert batcher.held == batcher._queued == batcher._coming == 0
    assert not batcher.is_alive
