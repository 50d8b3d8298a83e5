"""One training on every rank, from a config to a registered version."""

import logging
import os
import shutil
import time
from pathlib import Path

import torch
from accelerate import Accelerator

import zoo
from train import report
from train.build import build_run, wrap
from train.checkpoint import read_state
from train.config import TrainConfig
from train.errors import ConfigError
from train.latest import point_latest
from train.loop import fit
from train.publish import Published, find_lineage, publish, write_bundle
from train.ranks import check_world, describe_ranks, gather_json, together
from train.replicas import ReplicaReport, check_replicas
from train.resume import find_resume, restore, restore_random
from train.run import Run
from train.tracking import Tracker

logger = logging.getLogger(__name__)


def run_job(config: TrainConfig, accelerator: Accelerator, *, dry_run: bool = False) -> None:
    """Check everything, then train, evaluate and publish; with `dry_run` stop before the first step.

    Raises:
        TrainError, ZooError: A mistake of the user's; on every rank, before anything is written.
        CheckFailed, AuditError: A check found a fault; on every rank.
    """
    check_world(accelerator, os.environ)
    say(accelerator, f"ranks     {report.describe_world(describe_ranks(accelerator))}")
    tracker = Tracker(config.tracking, main=accelerator.is_main_process)
    with together(accelerator, "checking the tracking store"):
        tracker.check()
        check_writable(config.run_dir)
    run = build_run(config, accelerator, tracker)
    checkpoint = find_resume(config, accelerator)
    if checkpoint is not None:
        restore(run, checkpoint)
    say(accelerator, report.describe_plan(run))
    equal = check_run(run)
    if dry_run:
        say(accelerator, "dry run   everything is in place; nothing was trained or written")
    elif not (run.last_epoch and is_published(run, checkpoint)):
        train(run, checkpoint, equal)
    accelerator.end_training()


def say(accelerator: Accelerator, text: str) -> None:
    """Print on the main process."""
    if accelerator.is_main_process:
        print(text, flush=True)  # noqa: T201  (the command's output)


def check_run(run: Run) -> ReplicaReport:
    """Audit the model and compare it over the ranks before the wrap, while DDP cannot have hidden anything."""
    size = run.data.preprocessing.size
    images = torch.zeros(2, 3, *size, device=run.accelerator.device)
    with together(run.accelerator, "audit"):
        audit = zoo.audit(run.bare, run.optimizer, batch=images)
        audit.raise_for_findings()
    say(run.accelerator, f"audit     {str(audit).removeprefix('audit: ')}")
    equal = check_replicas(run.bare, run.accelerator)
    say(run.accelerator, f"replicas  {str(equal).removeprefix('replica check ')}")
    return equal


def check_writable(folder: Path) -> None:
    """Raise ConfigError if the run's folder could not be made or written."""
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ConfigError(f"output_dir: {there} cannot be written to; choose another with --output_dir")


def train(run: Run, checkpoint: Path | None, equal: ReplicaReport) -> None:
    """Wrap, train and publish, under one MLflow run that ends as the training does."""
    wrap(run)
    logger.info("%s", check_replicas(run.model, run.accelerator, when="after wrap"))
    start_tracking(run, checkpoint, equal)
    if checkpoint is not None:
        restore_random(run, checkpoint)
    with run.tracker.ending():
        start = time.perf_counter()
        metrics = fit(run)
        say(run.accelerator, report.describe_result(run, metrics, time.perf_counter() - start))
        if run.accelerator.is_main_process and run.config.publish.enabled:
            finish(run, metrics)


def start_tracking(run: Run, checkpoint: Path | None, equal: ReplicaReport) -> None:
    """Start the MLflow run on the main process, or go on with the checkpoint's, and name the run's folder after it."""
    with together(run.accelerator, "starting the MLflow run"):
        tags = {
            "ranks": str(run.accelerator.num_processes),
            "seeds": f"model and data order {run.config.seed} on every rank; dropout {run.config.seed} + rank",
            "replica_check": str(equal),
            "val_fingerprint": run.data.val_fingerprint if run.accelerator.is_main_process else "",
            "train_fingerprint": run.data.train_fingerprint,
        }
        run_id = None if checkpoint is None else read_state(checkpoint).run_id
        run.tracker.start(run.config, run_id=run_id, tags=tags)
    run.folder = run.config.run_dir / str(gather_json(run.tracker.run_id, run.accelerator)[0])


def finish(run: Run, metrics: dict[str, float]) -> None:
    """On the main process: keep the last checkpoint in MLflow, write the bundle, register it, say what comes next."""
    config = run.config
    model = run.accelerator.unwrap_model(run.model, keep_fp32_wrapper=False, keep_torch_compile=False)
    results = {
        "lineage": find_lineage(run.tracker.run_id),
        "metrics": metrics,
        "data_fingerprint": run.data.val_fingerprint,
    }
    card = run.card.model_copy(update=results)
    bundle = run.folder / "bundle"
    if bundle.exists():  # left by an earlier end of this very run that did not get to publish it
        shutil.rmtree(bundle)
    write_bundle(model, card, bundle)
    run.tracker.log_artifacts(run.checkpoints / f"step-{run.step:08d}", f"checkpoints/step-{run.step:08d}")
    point_latest(run.folder)
    published = publish(bundle, card, config.name, config.publish)
    run.tracker.set_tags({"published": f"{published.name}/{published.version}"})
    say_published(run, published)


def say_published(run: Run, published: Published) -> None:
    """Print the version and the commands that come next."""
    example = report.write_examples(run, run.config.run_dir / "examples")
    say(run.accelerator, f"registry  {published}\n{report.describe_next(run, published, example)}")


def is_published(run: Run, checkpoint: Path | None) -> bool:
    """Say whether a training that is at its last step has been published before, and tell the user."""
    tag: str | None = None
    with together(run.accelerator, "looking for the published version"):
        if checkpoint is not None and run.accelerator.is_main_process:
            tag = run.tracker.find_tag(read_state(checkpoint).run_id, "published")
    done = gather_json(tag, run.accelerator)[0]
    if done:
        say(run.accelerator, f"nothing left to train: {checkpoint} is the last step, published as {done}")
    return bool(done)
