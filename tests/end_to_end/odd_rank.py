"""One rank of a real training, with a mistake planted before it starts: `odd_rank.py MISTAKE ARGUMENT...`."""

import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version

import torch

from train import job, loop
from train.__main__ import main
from train.equality import facts
from train.meter import StepResult
from train.run import Run
from train.sampler import EpochBatches
from train.step import train_step
from zoo import unfreeze

ODD = os.environ["RANK"] == "1"


def starts_otherwise() -> None:
    hashed = facts.hash_sources()
    if ODD:
        sys.argv += ["--optimizer.lr", "0.004"]
        facts.hash_sources = lambda: {**hashed, "train/step.py": "edited"}
        facts.version = lambda name: "0.0.1" if name == "timm" else version(name)


def reads_other_data() -> None:
    if ODD:
        sys.argv[sys.argv.index("here")] = "there"


def draws_alike() -> None:
    wrap, make = job.wrap, EpochBatches.__init__

    def wrap_and_seed(run: Run) -> None:
        wrap(run)
        torch.manual_seed(7)

    job.wrap = wrap_and_seed
    EpochBatches.__init__ = lambda self, *given, **named: make(self, *given, **{**named, "rank": 0})


def at_each_step(work: Callable[[Run, Callable[[], StepResult]], StepResult]) -> None:
    loop.train_step = lambda run, batches: work(run, lambda: train_step(run, batches))


def unfreezes_in_mid_run() -> None:
    def work(run: Run, step: Callable[[], StepResult]) -> StepResult:
        if run.step == 2:
            unfreeze(run.bare, ["patch_embed"])
            run.optimizer.optimizer.add_param_group({"params": list(run.bare.patch_embed.parameters())})
        return step()

    at_each_step(work)


def skips_a_step() -> None:
    def work(run: Run, step: Callable[[], StepResult]) -> StepResult:
        if run.step != 2 or not ODD:
            return step()
        take, run.optimizer.optimizer.step = run.optimizer.optimizer.step, lambda *_: None
        result = step()
        run.optimizer.optimizer.step = take
        return result

    at_each_step(work)


MISTAKES: Sequence[Callable[[], None]] = (
    *(starts_otherwise, reads_other_data, draws_alike, unfreezes_in_mid_run, skips_a_step),
)

if __name__ == "__main__":
    planted = sys.argv.pop(1)
    next(mistake for mistake in MISTAKES if mistake.__name__ == planted)()
    sys.exit(main())
