"""Train from the first step to the last: the page to read first."""

import logging
import time
from dataclasses import dataclass, field
from typing import NoReturn, cast

import torch
from torch import Tensor
from tqdm import tqdm

import zoo
from train.evaluate import evaluate
from train.ranks import together
from train.replicas import check_replicas
from train.resume import save_checkpoint
from train.run import Run
from train.step import StepResult, train_step
from zoo.auditing.snapshots import Snapshot

logger = logging.getLogger(__name__)

_SILENCE_S = 15.0  # where no bar is shown, a line about training comes at most this often


@dataclass
class Meter:
    """Sums over the steps since the last record; time counts with the wait for data, without evaluation and saving."""

    losses: list[Tensor] = field(default_factory=list)
    images: int = 0
    seconds: float = 0.0
    mark: float = field(default_factory=time.perf_counter)

    def add(self, result: StepResult) -> None:
        """Count one step that has just ended."""
        self.losses.append(result.loss)
        self.images += result.images
        self.seconds += time.perf_counter() - self.mark

    def go_on(self) -> None:
        """Start the clock of the next step."""
        self.mark = time.perf_counter()


def fit(run: Run) -> dict[str, float]:
    """Train to the last step; return the last evaluation's metrics, the same on every rank.

    Raises:
        CheckFailed: On every rank, when a check finds a fault; the last checkpoint stays.
    """
    first, metrics, meter = run.step, dict[str, float](), Meter()
    before: Snapshot | None = zoo.snapshot(run.bare, run.optimizer)
    started = time.perf_counter()
    with progress_bar(run) as bar:
        for batches in run.batches():
            result = train_step(run, batches)
            meter.add(result)
            bar.update()
            if before is not None and before.steps:  # fp16's scaler may skip the first, and the second
                check_first_step(run, before)
                before = None
            if run.config.log.due(run.step) or run.last_epoch:
                record(run, meter, result, bar)
                meter = Meter()
            if (epoch := run.epoch_ended) is not None:
                metrics = end_epoch(run, epoch) or metrics
            meter.go_on()
    logger.info("steps=%d seconds=%.1f", run.step - first, time.perf_counter() - started)
    return metrics or evaluate(run)


def end_epoch(run: Run, epoch: int) -> dict[str, float]:
    """Evaluate and save where due after `epoch` epochs; return the metrics, empty where none were due."""
    metrics = dict[str, float]()
    if run.config.evaluate.due(epoch) or run.last_epoch:
        metrics = evaluate(run)
        run.tracker.log_metrics(metrics, step=run.step)
        logger.info("epoch=%d/%d %s", epoch, run.config.schedule.epochs, format_metrics(metrics))
    if run.config.checkpoint.due(epoch) or run.last_epoch:
        save_checkpoint(run)
    return metrics


def check_first_step(run: Run, before: Snapshot) -> None:
    """Prove that the first step reached every trainable parameter, and left every rank with the same ones."""
    with together(run.accelerator, "audit after the first step"):
        zoo.audit(run.bare, run.optimizer, before=before).raise_for_findings()
    report = check_replicas(run.model, run.accelerator, when="after the first step", buffers="integral")
    logger.info("%s", report)


def record(run: Run, meter: Meter, result: StepResult, bar: "tqdm[NoReturn]") -> None:
    """Log the mean loss of all ranks since the last record, learning rate and throughput; all ranks together."""
    local = torch.stack(meter.losses).mean()
    loss = cast(Tensor, run.accelerator.reduce(local, reduction="mean")).item()
    metrics = {"train/loss": loss, "train/lr": result.lr, "perf/images_per_s": meter.images / meter.seconds}
    run.tracker.log_metrics(metrics, step=run.step)
    bar.set_postfix_str(f"loss {loss:.3f}, {metrics['perf/images_per_s']:.0f} images/s")
    if bar.disable and time.perf_counter() - run.last_told > _SILENCE_S:
        logger.info("step=%d/%d %s", run.step, run.total_steps, format_metrics(metrics))
        run.last_told = time.perf_counter()


def progress_bar(run: Run) -> "tqdm[NoReturn]":
    """Build the bar over the optimizer steps: on the main process, and where somebody watches."""
    shown = run.accelerator.is_main_process and run.config.log.progress
    return tqdm(
        total=run.total_steps,
        initial=run.step,
        desc=run.config.name,
        unit="step",
        dynamic_ncols=True,
        disable=None if shown else True,  # None: only on a terminal
    )


def format_metrics(metrics: dict[str, float]) -> str:
    """Phrase metrics as key=value with four digits."""
    return " ".join(f"{key}={value:.4g}" for key, value in metrics.items())
