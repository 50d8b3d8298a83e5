import os
import re
import shutil
import signal
from pathlib import Path

import mlflow
import pytest
import torch

from tests.train.tiny import swapped, tiny_config, write_images
from train import job, loop
from train.build import build_accelerator
from train.data import Data
from train.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    PublishError,
    ReplicaMismatch,
    Stopped,
    TrackingError,
)
from train.faults import lock, stop
from train.faults.lock import occupied
from train.job import check_writable, run_job
from train.saving.checkpoint import find_newest
from train.step import train_step
from train.tracking import Tracker
from zoo.bundle import load_bundle

# MLflow's own, not ours to mend
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")


def go(config, *, dry_run: bool = False) -> None:
    run_job(config, build_accelerator(config.loop), dry_run=dry_run)


def runs_of(folder: Path) -> list[mlflow.entities.Run]:
    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("attention-zoo")
    return [] if experiment is None else client.search_runs([experiment.experiment_id])


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.slow
def test_job_trains_registers_and_says_so_and_a_second_call_does_nothing(tracked, here, capsys):
    go(tracked(publish__engine="auto"))
    said = capsys.readouterr()
    out = said.out
    assert [line.split()[0] for line in out.splitlines()] == [
        *("ranks", "model", "data", "schedule", "audit", "replicas", "result", "engine"),
        *("registry", "look", "serve", "then"),
    ]
    assert "onnx" not in said.err, "the exporter is quiet"
    engine = r"^engine    onnx fp32, logits within \d\.\de-0\d of torch's; top-1 \d+\.\d\d% as evaluated$"
    assert re.search(engine, out, re.MULTILINE), out
    assert "tiny version 1, @champion -> version 1 (the first version)" in out
    (run,) = runs_of(here)
    assert run.info.status == "FINISHED"
    assert run.data.tags["published"] == "tiny/1"
    assert run.data.tags["seeds"].startswith("model and data order 0 on every rank")
    folder = here / "runs" / "tiny" / run.info.run_id
    _, card = load_bundle(folder / "bundle")
    assert card.lineage.run_id == run.info.run_id
    assert card.metrics["val/top1"] == run.data.metrics["val/top1"]
    assert card.metrics["serve/top1"] == run.data.metrics["serve/top1"] == run.data.metrics["val/top1"]
    assert (card.engine.name, (folder / "bundle" / "model.onnx").is_file()) == ("onnx", True)
    assert card.data_fingerprint == run.data.tags["val_fingerprint"]
    artifacts = {item.path for item in mlflow.MlflowClient().list_artifacts(run.info.run_id, "checkpoints")}
    assert artifacts == {"checkpoints/step-00000012"}

    before = everything(here)
    go(tracked_again(here, resume="auto"))
    assert "step-00000012 is the last step, published as tiny/1" in capsys.readouterr().out
    assert everything(here) == before
    assert len(runs_of(here)) == 1


def tracked_again(here: Path, **fields: object):
    return tiny_config(here / "images", **fields)


@pytest.mark.slow
def test_finished_run_that_was_not_published_is_published_by_resuming(tracked, here, capsys):
    def refuse(*_args, **_kwargs):
        raise PublishError("tiny: the registry refused (no room)")

    config = tracked()
    with swapped(job, "publish", refuse), pytest.raises(PublishError):
        go(config)
    (run,) = runs_of(here)
    assert (run.info.status, run.data.tags["failure"]) == (
        "FAILED",
        "tiny: the registry refused (no room)",
    )
    assert (here / "runs" / "tiny" / run.info.run_id / "bundle" / "card.json").is_file()
    go(tracked_again(here, resume="auto"))
    assert "tiny version 1, @champion -> version 1" in capsys.readouterr().out
    (run,) = runs_of(here)
    assert run.info.status == "FINISHED"
    assert "failure" not in run.data.tags
    assert run.data.tags["failure.1"] == "tiny: the registry refused (no room)"


@pytest.mark.slow
def test_last_checkpoint_from_elsewhere_is_published_too(tracked, here, capsys):
    go(tracked(publish__enabled=False))
    path = find_newest(here / "runs" / "tiny")
    moved = shutil.move(path, here / "step-00000012")
    shutil.rmtree(here / "runs")
    go(tracked_again(here, resume=str(moved)))
    assert "tiny version 1" in capsys.readouterr().out


def test_run_that_fails_is_failed_in_mlflow(tracked, here, monkeypatch):
    def fail(*_args):
        raise RuntimeError("planned")

    monkeypatch.setattr(loop, "train_step", fail)
    with pytest.raises(RuntimeError, match="planned"):
        go(tracked())
    (run,) = runs_of(here)
    assert (run.info.status, run.data.tags["failure"]) == ("FAILED", "RuntimeError: planned")


def test_sigterm_in_training_saves_after_the_step_and_a_resumed_run_goes_on_from_there(tracked, here, capsys):
    def stepping(run, batches):
        if run.step == 8:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(run, batches)

    with (
        swapped(loop, "train_step", stepping),
        stop.listening(),
        pytest.raises(Stopped, match="SIGTERM after step 9 of 12"),
    ):
        go(tracked(publish__enabled=False))
    (run,) = runs_of(here)
    assert (run.info.status, run.data.tags["failure"]) == ("KILLED", "SIGTERM after step 9 of 12")
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("stopped: ")]
    newest = find_newest(here / "runs" / "tiny")
    assert newest.parts[-3:] == (run.info.run_id, "checkpoints", "step-00000009")
    assert said == (
        f"stopped: SIGTERM after step 9 of 12; the last good checkpoint is {newest}; --resume auto goes on from there"
    )
    go(tracked_again(here, resume="auto", publish__enabled=False))
    (run,) = runs_of(here)
    assert (run.info.status, run.data.tags["failure.1"]) == ("FINISHED", "SIGTERM after step 9 of 12")


@pytest.mark.slow
def test_start_that_is_refused_leaves_the_mlflow_run_to_who_trains_in_it(tracked, here, monkeypatch):
    monkeypatch.setattr(lock, "_PATIENCE_S", 0.1)
    go(tracked(publish__enabled=False, **ONE_EPOCH))
    (run,) = runs_of(here)
    mlflow.MlflowClient().update_run(run.info.run_id, "RUNNING")
    with (
        occupied(here / "runs" / "tiny" / run.info.run_id),
        pytest.raises(CheckpointError, match=r"trains in it; wait"),
    ):
        go(tracked_again(here, resume="auto", **ONE_EPOCH))
    (run,) = runs_of(here)
    assert (run.info.status, run.data.tags.get("failure")) == ("RUNNING", None)


def test_dry_run_checks_everything_and_writes_nothing(tiny, here, capsys):
    before = everything(here)
    go(tiny(), dry_run=True)
    assert "everything is in place; nothing was trained or written" in capsys.readouterr().out
    assert everything(here) == before


def test_dry_run_leaves_a_store_that_is_there_as_it_is(tracked, here):
    go(tracked(), dry_run=True)
    assert runs_of(here) == []
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    ("fields", "error", "said"),
    [
        ({"data__root": "none"}, DataError, "none"),
        ({"tracking__uri": "http://127.0.0.1:1"}, TrackingError, "cannot be reached"),
        ({"resume": "none"}, CheckpointError, "no such directory"),
        ({"output_dir": "images/train/ash/0.png"}, ConfigError, r"output_dir: .*0\.png cannot be written to"),
    ],
)
def test_mistake_is_found_before_anything_is_written(tiny, here, fields, error, said):
    config = tiny(**fields)
    before = everything(here)
    with pytest.raises(error, match=said):
        go(config)
    assert everything(here) == before


def test_folder_that_can_be_made_is_writable(here):
    check_writable(here / "a" / "b")
    check_writable(Path("runs/tiny"))


ONE_EPOCH = {"schedule__epochs": 1, "schedule__warmup_epochs": 0}


def attempt(root: str, *, dry_run: bool = False, **fields: object) -> str:
    """Run the job and return how it ended; the process group stays, for the next."""
    config = tiny_config(root, **fields)
    accelerator = build_accelerator(config.loop)
    accelerator.end_training = lambda: None
    try:
        run_job(config, accelerator, dry_run=dry_run)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def planted_on(accelerator, rank: int, real, plant):
    """Return `real`, with `plant(result)` after it on one rank alone."""

    def call(*args):
        result = real(*args)
        if accelerator.process_index == rank:
            plant(result)
        return result

    return call


def flip_a_bit(run) -> None:
    with torch.no_grad():
        run.bare.head.bias[0] += 1


def lose_the_store(_result) -> None:
    raise TrackingError("the store is gone")


class LostImages(Data):
    """Data whose validation images have gone since they were listed."""

    @property
    def val_fingerprint(self) -> str:
        raise DataError("an image has gone")


def lose_the_images(run) -> None:
    run.data = LostImages(**vars(run.data))


def dry_run_and_faults(accelerator, root: str) -> dict[str, object]:
    """On two ranks: a dry run, then mistakes and faults that only one rank meets; nobody must wait."""
    folder = Path(root).parent
    os.chdir(folder)
    before = everything(folder)
    said: dict[str, object] = {"dry": attempt(root, dry_run=True)}
    said["dry wrote"] = sorted(set(everything(folder)) - set(before))
    said["no such data"] = attempt(root, data__root="none")
    said["store"] = attempt(root, tracking__uri="http://127.0.0.1:1")
    with swapped(job, "build_run", planted_on(accelerator, 1, job.build_run, flip_a_bit)):
        said["flipped bit"] = attempt(root)
    with swapped(job, "build_run", planted_on(accelerator, 0, job.build_run, lose_the_images)):
        said["fingerprint"] = attempt(root)
    said["trained once"] = attempt(root, publish__enabled=False, **ONE_EPOCH)
    with swapped(Tracker, "find_tag", planted_on(accelerator, 0, Tracker.find_tag, lose_the_store)):
        said["tag"] = attempt(root, resume="auto", **ONE_EPOCH)
    return said


@pytest.mark.slow
def test_what_one_rank_meets_stops_both_with_one_message(run_ranks, tmp_path):
    first, second = run_ranks(dry_run_and_faults, root=str(write_images(tmp_path / "images")), timeout_s=200)
    assert not first.error, first.traceback
    assert not second.error, second.traceback
    assert first.value["dry"] == second.value["dry"] == "done"
    assert first.value["dry wrote"] == []
    for name, kind, text in (
        ("no such data", "DataError", "none"),
        ("store", "TrackingError", "cannot be reached"),
        ("flipped bit", ReplicaMismatch.__name__, "head.bias"),
        ("tag", "TrackingError", "the store is gone"),
        ("fingerprint", "DataError", "an image has gone"),
    ):
        assert first.value[name] == second.value[name], name
        assert first.value[name].startswith(f"{kind}: "), first.value[name]
        assert text in first.value[name]
    assert first.value["trained once"] == "done"
