"""Fixtures that more than one test file uses."""

import inspect
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import rank_worker, warm

ROOT = Path(__file__).parent.parent
torch.set_num_threads(1)  # the tensors of most tests are small: more threads only wait for one another


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is marked `gpu` where there is none."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")


@dataclass(frozen=True)
class Outcome:
    """What one rank's function returned, or the error it raised."""

    rank: int
    value: Any = None
    error: str = ""
    message: str = ""
    traceback: str = ""


RunRanks = Callable[..., list[Outcome]]


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> RunRanks:
    """Call a module-level function `f(accelerator, **arguments)` on N real gloo ranks, each a process of its own.

    `run_ranks(f, world_size=2, timeout_s=300, **arguments)` gives an Outcome for each rank, in rank order. Arguments
    and returned values travel as JSON. A rank that leaves no outcome fails the test with what it printed.
    """

    def run(
        function: Callable[..., Any], *, world_size: int = 2, timeout_s: float = 300, **arguments: Any
    ) -> list[Outcome]:
        folder = tmp_path_factory.mktemp(function.__name__)
        processes = [_start(function, rank, world_size, folder, arguments) for rank in range(world_size)]
        try:
            if not _wait(processes, timeout_s):
                pytest.fail(f"{function.__name__}: a rank still ran after {timeout_s} s{_printed(folder)}")
        finally:
            for process in processes:
                process.kill()
                process.join()
        texts = [folder / f"outcome{rank}.json" for rank in range(world_size)]
        if not all(text.exists() for text in texts):
            pytest.fail(f"{function.__name__}: a rank left no outcome{_printed(folder)}")
        return [Outcome(rank, **json.loads(text.read_text(encoding="utf-8"))) for rank, text in enumerate(texts)]

    return run


def _wait(processes: list[ForkServerProcess], timeout_s: float) -> bool:
    """Wait until all ranks have ended or one has died, for which the others might wait for ever; False on timeout."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        statuses = [process.exitcode for process in processes]
        if None not in statuses or any(statuses):
            return True
        time.sleep(0.05)
    return False


def _start(
    function: Callable[..., Any], rank: int, world_size: int, folder: Path, arguments: dict[str, Any]
) -> ForkServerProcess:
    job = {
        "file": inspect.getfile(function),
        "function": function.__name__,
        "arguments": arguments,
        "rank": rank,
        "world_size": world_size,
        "store": str(folder / "store"),
        "outcome": str(folder / f"outcome{rank}.json"),
    }
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    environ = {
        **os.environ,
        **({name: str(value) for name, value in ranks.items()} if world_size > 1 else {}),
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),  # of what a rank starts itself
    }
    return warm.start(rank_worker.main, job, environ=environ, log=folder / f"rank{rank}.log")


def _printed(folder: Path) -> str:
    return "".join(f"\n--- {log.name}\n{log.read_text(errors='replace')}" for log in sorted(folder.glob("*.log")))
