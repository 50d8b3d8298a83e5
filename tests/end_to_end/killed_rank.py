"""One rank of a real training that kills itself where it is told to, and notes what it has seen of each step."""

import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import accelerate
import mlflow

from train import build, evaluate, job, loop
from train.__main__ import main
from train.meter import Meter
from train.sampler import EpochBatches
from train.saving import checkpoint
from zoo.files import durable

Where = Literal["backward", "save", "evaluation", "record", "time"]


@dataclass(frozen=True)
class KillPoint:
    """Where a run is killed.

    Attributes:
        where: After a backward; within or after an operation on files of a save; after a batch of an evaluation, or
            after metrics went to the store; or after a time.
        count: Which one, from 1, in the life of a process; milliseconds for a time.
        ranks: Who dies there by itself; the others are killed at once, or in a moment.
        alone: Whether the others live on for a moment.
    """

    where: Where
    count: int
    ranks: tuple[int, ...] = (0,)
    alone: bool = False

    def __str__(self) -> str:
        who = "all ranks" if not self.alone else f"rank {self.ranks[0]} first"
        return f"{self.where} {self.count}{' ms' if self.where == 'time' else ''}, {who}"


def draw_kill_point(draws: random.Random, world_size: int) -> KillPoint:
    """Draw a kill point; a save is drawn twice as often as the others, since most can go wrong there."""
    where = draws.choice(("backward", "backward", "save", "save", "save", "evaluation", "record", "time"))
    last = {"backward": 24, "save": 44, "evaluation": 4, "record": 4, "time": 2500}[where]
    everyone = tuple(range(world_size))
    alone = where != "time" and world_size > 1 and draws.random() < 0.3
    if where in ("save", "record"):  # the main process's alone
        return KillPoint(where, draws.randint(1, last), (0,), alone)
    return KillPoint(where, draws.randint(1, last), (draws.choice(everyone),) if alone else everyone, alone)


@dataclass(frozen=True)
class Job:
    """One rank's `python -m train ARGUMENTS`, as a launcher starts it in `folder`, and what is done to it.

    It notes what it has seen of each step in FOLDER/steps0.jsonl.
    """

    rank: int
    world_size: int
    port: int
    folder: Path
    arguments: tuple[str, ...]
    point: KillPoint | None = None
    fault: str = ""


FAULTS: dict[str, tuple[Any, str]] = {
    "buckets as DDP has them at a start": (build, "settle_buckets"),
    "no random states": (job, "restore_random"),
    "no losses since the last record": (Meter, "restore"),
}
"""What a resume without one of its parts would be; for the test of the test."""


def train_rank(task: Job) -> None:
    """Run one rank; never returns."""
    os.chdir(task.folder)
    if task.world_size > 1:
        numbers = {"RANK": task.rank, "WORLD_SIZE": task.world_size, "MASTER_PORT": task.port}
        numbers |= {"LOCAL_RANK": task.rank, "LOCAL_WORLD_SIZE": task.world_size}
        os.environ.update({name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"})
    note_steps(os.open(f"steps{task.rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    if task.point is not None and task.rank in task.point.ranks:
        plant(task.point)
    if task.fault:
        owner, name = FAULTS[task.fault]
        setattr(owner, name, lambda *_: None)
    status = main(list(task.arguments))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def note_steps(file: int) -> None:
    """Write a line for each step: its number, its images on this rank in their order, and its learning rate."""
    drawn: list[list[int]] = []
    draw, take = EpochBatches.__iter__, loop.train_step

    def noting(sampler: EpochBatches) -> Iterator[Any]:
        for batch in draw(sampler):
            drawn.append([number for one in batch for number in one])
            yield batch

    def stepping(run: Any, batches: Any) -> Any:
        step, images = run.step, drawn[-len(batches) :]  # what was drawn before is a look at the first batch
        drawn.clear()
        result = take(run, batches)
        os.write(file, (json.dumps({"step": step, "images": images, "lr": result.lr}) + "\n").encode())
        return result

    EpochBatches.__iter__ = noting  # type: ignore[method-assign]
    loop.train_step = stepping


class Countdown:
    """Ends this process, as by SIGKILL, when it has been ticked so often."""

    def __init__(self, count: int) -> None:
        self.left = count

    def tick(self) -> None:
        """Count one."""
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self, owner: Any, name: str, half: Callable[..., None] | None = None) -> None:
        """Tick after each call of a function, which is before the next, and within it if half of it can be done."""
        real = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            if half is not None:
                if self.left == 1:
                    half(real, *args)
                self.tick()
            result = real(*args, **options)
            self.tick()
            return result

        setattr(owner, name, call)


def plant(point: KillPoint) -> None:
    """Let this process die at a point, but for a time, at which its parent kills it."""
    countdown = Countdown(point.count)
    if point.where == "backward":
        countdown.watch(accelerate.Accelerator, "backward")
    elif point.where == "evaluation":
        countdown.watch(evaluate, "score")
    elif point.where == "record":
        countdown.watch(mlflow, "log_metrics")
    elif point.where == "save":
        countdown.watch(checkpoint, "save_file", _write_half)
        countdown.watch(durable, "flush")
        countdown.watch(shutil, "rmtree", _remove_half)
        countdown.watch(Path, "rename")


def _write_half(real: Callable[..., None], tensors: Any, path: Path, *options: Any) -> None:
    real(tensors, path, *options)
    os.truncate(path, path.stat().st_size // 2)


def _remove_half(_real: Callable[..., None], path: Path) -> None:
    for file in sorted(Path(path).glob("*"))[:1]:
        file.unlink()
