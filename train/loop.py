"""Train from the first step to the last: the page to read first."""

import logging
import time
from typing import NoReturn, cast

from torch import Tensor
from tqdm import tqdm

import zoo
from train.drift import DriftCheck
from train.errors import Stopped
from train.evaluate import evaluate
from train.faults import pulse, stop
from train.faults.vote import StopVote
from train.meter import StepResult
from train.ranks import gather_json, together
from train.run import Run
from train.saving.resume import save_checkpoint
from train.step import train_step
from zoo.auditing.snapshots import Snapshot

logger = logging.getLogger(__name__)

_SILENCE_S = 15.0  # where no bar is shown, a line about training comes at most this often


def fit(run: Run) -> dict[str, float]:
    """Train to the last step; return the last evaluation's metrics, the same on every rank.

    Raises:
        CheckFailed: On every rank, when a check finds a fault; the last checkpoint stays.
        Stopped: On every rank after the same step, which is saved, when any of them was asked to stop.
    """
    first, metrics = run.step, dict[str, float]()
    before: Snapshot | None = zoo.snapshot(run.bare, run.optimizer)
    vote = StopVote(run.accelerator)
    drift = DriftCheck(
        run.model,
        run.accelerator,
        run.optimizer,
        every_steps=run.config.watch.drift_every_steps,
        last_step=run.total_steps,
    )
    started = time.perf_counter()
    pulse.mark(f"before step {run.step + 1}: waiting for images")
    run.meter.go_on()
    with stop.graceful(), progress_bar(run) as bar:
        for batches in run.batches():
            result = train_step(run, batches)
            run.meter.add(result)
            bar.update()
            if before is not None and before.steps:  # fp16's scaler may skip the first, and the second
                audit_first_step(run, before)
                before = None
            drift.after_step(run.step)
            if run.config.log.due(run.step) or run.last_epoch:
                record(run, result, bar)
            if (epoch := run.epoch_ended) is not None:
                metrics = end_epoch(run, epoch) or metrics
            elif run.config.checkpoint.due_at(run.step):
                save_checkpoint(run)
            if vote.cast():
                leave(run)
            pulse.mark(f"after step {run.step}: waiting for images")
            run.meter.go_on()
    seconds = time.perf_counter() - started
    logger.info("steps=%d seconds=%.1f; %s", run.step - first, seconds, drift.describe(seconds))
    if not metrics:  # it was at its end already, or fewer images than a step takes were left of the last epoch
        metrics = evaluate(run)
        run.tracker.log_metrics(metrics, step=run.step)
    return metrics


def leave(run: Run) -> NoReturn:
    """Save after the step in which all ranks agreed to leave, and stop; all ranks together."""
    save_checkpoint(run)
    asked = gather_json(stop.requested(), run.accelerator)
    reason = next((who for who in asked if who), "a signal")
    raise Stopped(f"{reason} after step {run.step} of {run.total_steps}", agreed=True)


def end_epoch(run: Run, epoch: int) -> dict[str, float]:
    """Evaluate and save where due after `epoch` epochs; return the metrics, empty where none were due."""
    metrics = dict[str, float]()
    if run.config.evaluate.due(epoch) or run.last_epoch:
        metrics = evaluate(run)
        run.tracker.log_metrics(metrics, step=run.step)
        logger.info("epoch=%d/%d %s", epoch, run.config.schedule.epochs, format_metrics(metrics))
    if run.config.checkpoint.due(epoch) or run.config.checkpoint.due_at(run.step) or run.last_epoch:
        save_checkpoint(run)
    return metrics


def audit_first_step(run: Run, before: Snapshot) -> None:
    """Prove that the first step reached every trainable parameter."""
    with together(run.accelerator, "audit after the first step"):
        zoo.audit(run.bare, run.optimizer, before=before).raise_for_findings()


def record(run: Run, result: StepResult, bar: "tqdm[NoReturn]") -> None:
    """Log the mean loss of all ranks since the last record, learning rate and throughput; all ranks together."""
    loss = cast(Tensor, run.accelerator.reduce(run.meter.mean_loss(), reduction="mean")).item()
    speed = run.meter.images / run.meter.seconds
    metrics = {"train/loss": loss, "train/lr": result.lr, "perf/images_per_s": speed}
    run.tracker.log_metrics(metrics, step=run.step)
    run.meter.reset()
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
