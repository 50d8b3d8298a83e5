"""Processes that start warm: forked from one that has imported, once and not in each of them, what takes seconds."""

import multiprocessing
import os
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from threading import RLock
from typing import Any

ROOT = Path(__file__).parent.parent
_IMPORTED = (
    "tests.rank_worker",
    "train.__main__",
    "mlflow.tracking.client",
    "mlflow.store.tracking.sqlalchemy_store",
    "sklearn.datasets",
)


def start(function: Callable[..., object], *arguments: Any, environ: Mapping[str, str], log: Path) -> ForkServerProcess:
    """Start a process that calls a module's own function in the repository's root, and return it.

    Args:
        function: What it calls; importable by name.
        arguments: What it is given.
        environ: Its whole environment. It has imported torch already, on one thread.
        log: Where it adds what it prints.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED))
    process = context.Process(target=_enter, args=(dict(environ), log, function, arguments))
    kept = dict(os.environ)
    os.environ.update(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))  # read by the one that all are forked from
    try:
        process.start()
    finally:
        os.environ.clear()
        os.environ.update(kept)
    return process


def _enter(environ: dict[str, str], log: Path, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    import torch
    from tqdm import tqdm

    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(ROOT)
    torch.set_num_threads(1)
    tqdm.set_lock(RLock())  # else a semaphore outlives a process that is killed
    function(*arguments)
