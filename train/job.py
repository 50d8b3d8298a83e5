"""One training on every rank, from a config to a registered version."""

import logging
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from accelerate import Accelerator

import zoo
from train import report
from train.build import build_run, wrap
from train.config import TrainConfig
from train.engine import SERVED, write_equipped
from train.equality.agreement import Facts, check_agreement, check_streams
from train.equality.facts import data_facts, first_draws, resume_facts, start_facts
from train.errors import ConfigError
from train.faults import pulse
from train.faults.lock import mark_abandoned, occupied
from train.faults.watch import Watch
from train.faults.watched import watched
from train.loop import fit
from train.publish import Published, find_lineage, publish
from train.ranks import check_world, describe_ranks, gather_json, together
from train.replicas import ReplicaReport, check_replicas
from train.run import Run
from train.saving.checkpoint import Resume
from train.saving.latest import point_latest
from train.saving.resume import find_resume, restore, restore_random, save_checkpoint
from train.tracking import Tracker

logger = logging.getLogger(__name__)


def run_job(config: TrainConfig, accelerator: Accelerator, *, dry_run: bool = False) -> None:
    """Check everything, then train, evaluate and publish; with `dry_run` stop before the first step.

    Raises:
        TrainError, ZooError: A mistake of the user's; on every rank, before anything is written.
        CheckFailed, AuditError: A check found a fault; on every rank.
        RunEnded: Another rank was the first to fail.
        Stopped: The run was asked to stop; it is saved.
    """
    check_world(accelerator, os.environ)
    infos = describe_ranks(accelerator)
    say(accelerator, f"ranks     {report.describe_world(infos)}")
    if writes := report.describe_writes(config, infos):
        say(accelerator, writes)
    tracker = Tracker(config.tracking, main=accelerator.is_main_process)
    with tracker.ending(), watched(config, accelerator, infos) as watch:
        check_agreement(accelerator, lambda: start_facts(config, os.environ), what="start")
        with together(accelerator, "checking the tracking store"):
            tracker.check()
            if accelerator.is_main_process:  # nobody else writes
                check_writable(config.run_dir)
        run = build_run(config, accelerator, tracker)
        check_agreement(accelerator, lambda: data_facts(run.data), what="data")
        resume = find_resume(config, accelerator)
        changes = [] if resume is None else restore(run, resume)
        check_agreement(accelerator, lambda: found_facts(run, resume), what="checkpoint")
        say(accelerator, "\n".join((report.describe_plan(run), *(f"changed   {line}" for line in changes))))
        if accelerator.num_processes > 1:
            checkpoint = "" if resume is None else f", checkpoint (step {run.step})"
            say(accelerator, f"agreed    on all ranks: config, code, package versions, data{checkpoint}")
        equal = check_run(run)
        if dry_run:
            say(accelerator, "dry run   everything is in place; nothing was trained or written")
        elif not (run.last_epoch and is_published(run, resume)):
            train(run, resume, equal, watch, changes)
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
    equal = check_replicas(run.bare, run.accelerator, optimizer=run.optimizer)
    say(run.accelerator, f"replicas  {str(equal).removeprefix('replica check ')}")
    return equal


def found_facts(run: Run, resume: Resume | None) -> Facts:
    """Collect what a rank goes on from: the checkpoint as this rank was told, and where it stands in it."""
    state = None if resume is None else resume.state
    digest = "" if state is None else " ".join(record.xxh3_128 for record in state.files.values())
    return resume_facts(None if state is None else state.run_id, run.step, run.plan.locate(run.step).epoch, digest)


def check_writable(folder: Path) -> None:
    """Raise ConfigError if the run's folder could not be made or written."""
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ConfigError(f"output_dir: {there} cannot be written to; choose another with --output_dir")


def train(run: Run, resume: Resume | None, equal: ReplicaReport, watch: Watch, changes: Sequence[str] = ()) -> None:
    """Wrap, train and publish, under one MLflow run that ends as the training does."""
    wrap(run)
    logger.info("%s", check_replicas(run.model, run.accelerator, when="after wrap"))
    with ExitStack() as held:
        with together(run.accelerator, "taking the run's folder"):
            if run.accelerator.is_main_process:
                mark_abandoned(run.config.run_dir, run.config.tracking.uri)
                if resume is not None:  # before its MLflow run is touched, which may be another process's
                    held.enter_context(occupied(run.config.run_dir / resume.state.run_id))
        start_tracking(run, resume, equal, changes)
        watch.words.run_id, watch.words.advice = run.folder.name, lambda: report.describe_rest(run)
        with together(run.accelerator, "taking the run's folder"):
            if run.accelerator.is_main_process and resume is None:
                held.enter_context(occupied(run.folder))
        if resume is not None:
            restore_random(run, resume)
        else:
            save_checkpoint(run)  # what goes wrong from here on can be resumed, and a full disk shows before the work
        position = run.plan.locate(run.step)
        if not run.last_epoch:
            check_streams(run.accelerator, lambda: first_draws(run.data, run.train_loader, position))
        start = time.perf_counter()
        metrics = fit(run)
        say(run.accelerator, report.describe_result(run, metrics, time.perf_counter() - start))
        save_checkpoint(run)  # where a resumed run was at its end, what is left to do is to keep and publish it
        if run.accelerator.is_main_process and run.config.publish.enabled:
            pulse.mark("publishing", patient=True)
            finish(run, metrics)


def start_tracking(run: Run, resume: Resume | None, equal: ReplicaReport, changes: Sequence[str]) -> None:
    """Start the MLflow run on the main process, or go on with the checkpoint's, and name the run's folder after it."""
    with together(run.accelerator, "starting the MLflow run"):
        tags = {
            "ranks": str(run.accelerator.num_processes),
            "seeds": f"model and data order {run.config.seed} on every rank; dropout {run.config.seed} + rank",
            "replica_check": str(equal),
            "val_fingerprint": run.data.val_fingerprint if run.accelerator.is_main_process else "",
            "train_fingerprint": run.data.train_fingerprint,
        }
        if changes and resume is not None:
            tags[f"changed.step_{resume.state.step}"] = "; ".join(changes)
        run.tracker.start(run.config, run_id=None if resume is None else resume.state.run_id, tags=tags)
        run.tracker.restore_pending(() if resume is None else resume.state.pending)
    run.folder = run.config.run_dir / str(gather_json(run.tracker.run_id, run.accelerator)[0])


def finish(run: Run, metrics: dict[str, float]) -> None:
    """On the main process: write the bundle, keep the last checkpoint in MLflow, register it, say what comes next."""
    config = run.config
    model = run.accelerator.unwrap_model(run.model, keep_fp32_wrapper=False, keep_torch_compile=False)
    results = {
        "lineage": find_lineage(run.tracker.run_id),
        "metrics": metrics,
        "data_fingerprint": run.data.val_fingerprint,
    }
    card = run.card.model_copy(update=results)
    bundle = run.folder / "bundle"
    equipped = write_equipped(run, model, card, bundle)
    run.card = equipped.card
    say(run.accelerator, f"engine    {equipped}")
    run.tracker.log_artifacts(run.checkpoints / f"step-{run.step:08d}", f"checkpoints/step-{run.step:08d}")
    point_latest(run.folder)
    published = publish(bundle, run.card, config.name, config.publish)
    run.tracker.log_metrics({SERVED: run.card.metrics[SERVED]}, step=run.step)
    run.tracker.set_tags({"published": f"{published.name}/{published.version}"})
    say_published(run, published)


def say_published(run: Run, published: Published) -> None:
    """Print the version and the commands that come next."""
    example = report.write_examples(run, run.config.run_dir / "examples")
    say(run.accelerator, f"registry  {published}\n{report.describe_next(run, published, example)}")


def is_published(run: Run, resume: Resume | None) -> bool:
    """Say whether a training that is at its last step has been published before, and tell the user."""
    tag: str | None = None
    with together(run.accelerator, "looking for the published version"):
        if resume is not None and run.accelerator.is_main_process:
            tag = run.tracker.find_tag(resume.state.run_id, "published")
    done = gather_json(tag, run.accelerator)[0]
    if done and resume is not None:
        say(run.accelerator, f"nothing left to train: {resume.path} is the last step, published as {done}")
    return bool(done)
