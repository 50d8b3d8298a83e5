"""What ranks do together when they save and go on: with as many as before, and with others."""

import json
from collections.abc import Iterator
from pathlib import Path

import mlflow
import pytest
import torch

from tests.train.tiny import build_tiny, swapped, tiny_config, write_images
from train import loop
from train.build import build_accelerator, wrap
from train.errors import CheckpointError
from train.job import run_job
from train.run import Run
from train.sampler import EpochBatches
from train.saving.checkpoint import MODEL, find_newest
from train.saving.resume import find_resume, restore, restore_random, save_checkpoint
from train.step import train_step

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning"),  # MLflow's own, not ours to mend
]
DROPOUT = {"model__timm_kwargs": {"drop_rate": 0.3, "proj_drop_rate": 0.3}}


class PowerCutError(RuntimeError):
    """What stops a run between two checkpoints."""


class Recorder:
    """Stands for train_step in the loop: notes each step's images and rate, and fails before step `fail_at`."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.fail_at, self.images, self.rates = fail_at, dict[str, list[float]](), dict[str, float]()

    def __call__(self, run: Run, batches):
        if run.step == self.fail_at:
            raise PowerCutError("planned")
        key = str(run.step)
        self.images[key] = [image.double().sum().item() for images, _ in batches for image in images]
        result = train_step(run, batches)
        self.rates[key] = run.optimizer.param_groups[0]["lr"]
        return result


def train_once(config, recorder: Recorder) -> str:
    """Run the job; return how it ended. The process group stays, for the next."""
    accelerator = build_accelerator(config.loop)
    accelerator.end_training = lambda: None
    try:
        with swapped(loop, "train_step", recorder):
            run_job(config, accelerator)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def straight_and_resumed(accelerator, root: str, folder: str) -> dict[str, object]:
    """Train nine steps straight; the same, cut off at step 5 and resumed behind step 4, in the middle of an epoch."""
    fields = {**DROPOUT, "schedule__epochs": 3, "publish__enabled": False}
    fields |= {"checkpoint__keep": 9, "checkpoint__every_steps": 2, "log__every_steps": 3}
    there = Path(folder)
    straight, cut, after, again = Recorder(), Recorder(fail_at=5), Recorder(), Recorder()
    config_a = tiny_config(root, output_dir=str(there / "a"), **fields)
    config_b = tiny_config(root, output_dir=str(there / "b"), **fields)
    auto = tiny_config(root, output_dir=str(there / "b"), resume="auto", **fields)
    ends = [train_once(config_a, straight), train_once(config_b, cut), train_once(auto, after)]
    refused = tiny_config(root, output_dir=str(there / "b"), resume="auto", **{**fields, "optimizer__lr": 0.5})
    ends.append(train_once(refused, again))
    recorders = {"straight": straight, "cut": cut, "after": after}
    return {
        "ends": ends,
        "images": {name: recorder.images for name, recorder in recorders.items()},
        "rates": {name: recorder.rates for name, recorder in recorders.items()},
        "ranks": accelerator.num_processes,
    }


def test_two_ranks_cut_off_between_checkpoints_end_as_if_they_had_not_been(run_ranks, tracked, here):
    tracked()
    outcomes = run_ranks(straight_and_resumed, root=str(here / "images"), folder=str(here))
    assert not any(outcome.error for outcome in outcomes), outcomes[0].traceback
    for outcome in outcomes:
        done, cut, resumed_end, refused = outcome.value["ends"]
        assert (done, resumed_end) == ("done", "done")
        assert cut.endswith("PowerCutError: planned")
        assert refused.startswith("CheckpointError: ")
        assert "optimizer.lr was 0.01 and is 0.5" in refused
        for kind in ("images", "rates"):
            straight, first, after = (outcome.value[kind][name] for name in ("straight", "cut", "after"))
            assert list(straight) == [str(step) for step in range(9)]
            assert list(first) == ["0", "1", "2", "3", "4"]
            assert list(after) == ["4", "5", "6", "7", "8"]
            assert first | after == straight
    mine, theirs = (outcome.value["images"]["straight"] for outcome in outcomes)
    assert not {i for images in mine.values() for i in images} & {i for images in theirs.values() for i in images}

    a, b = find_newest(here / "a" / "tiny"), find_newest(here / "b" / "tiny")
    for file in (MODEL, "optimizer.safetensors", "rng.safetensors"):
        assert (a / file).read_bytes() == (b / file).read_bytes(), file
    assert {path.name for path in b.parent.iterdir()} == {f"step-{step:08d}" for step in (0, 2, 3, 4, 6, 8, 9)}

    client = mlflow.MlflowClient(f"sqlite:///{here}/mlflow.db")
    experiment = client.get_experiment_by_name("attention-zoo")
    runs = client.search_runs([experiment.experiment_id])
    assert sorted(run.info.run_id for run in runs) == sorted([a.parts[-3], b.parts[-3]])
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert json.loads((b / "state.json").read_text())["run_id"] == b.parts[-3]
    for run_id in (a.parts[-3], b.parts[-3]):
        for key in ("train/loss", "train/lr"):
            steps = [metric.step for metric in client.get_metric_history(run_id, key)]
            assert steps == [3, 6, 9], key
        assert [m.step for m in client.get_metric_history(run_id, "val/top1")] == [3, 6, 9]
    for key in ("train/loss", "train/lr", "val/loss", "val/top1"):
        one, other = (client.get_metric_history(path.parts[-3], key) for path in (a, b))
        assert [metric.value for metric in one] == [metric.value for metric in other], key


def step_and_note(run: Run, count: int) -> list[dict[str, object]]:
    """Take up to `count` steps; note of each its rate, its images on this rank and a draw of dropout's stream."""
    drawn: list[int] = []
    real = EpochBatches.__iter__

    def noting(sampler: EpochBatches) -> Iterator:
        for batch in real(sampler):
            drawn.extend(draw.image for draw in batch)
            yield batch

    notes = []
    with swapped(EpochBatches, "__iter__", noting):
        for _, batches in zip(range(count), run.batches(), strict=False):
            epoch = run.plan.locate(run.step).epoch
            result = train_step(run, batches)
            run.meter.add(result)
            notes.append({"epoch": epoch, "images": drawn[:], "lr": result.lr})
            drawn.clear()
    return notes


def first_ranks(accelerator, root: str, steps: int) -> dict[str, object]:
    """Train some steps and save; the folder is rank 0's alone."""
    run = build_tiny(tiny_config(root, **DROPOUT, schedule__epochs=3))
    notes = step_and_note(run, steps)
    save_checkpoint(run)
    return {"notes": notes, "total": run.total_steps, "losses": run.meter.state(), "ranks": accelerator.num_processes}


def other_ranks(accelerator, root: str, **fields: object) -> dict[str, object]:
    """Go on from the newest checkpoint; every rank but the main one looks for it in a folder that is not there."""
    config = tiny_config(root, **DROPOUT, schedule__epochs=3, resume="auto", **fields)
    if not accelerator.is_main_process:
        config = config.model_copy(update={"output_dir": Path("nowhere")})
    run = build_tiny(config, wrapped=False)
    found = find_resume(config, run.accelerator)
    changes = restore(run, found)
    wrap(run)
    restore_random(run, found)
    losses, draw = run.meter.state(), torch.rand(()).item()
    restore_random(run, found)
    notes = step_and_note(run, 99)
    return {
        "changes": changes,
        "losses": losses,
        "draws": draw,
        "notes": notes,
        "step": run.step,
        "origin": [run.plan.origin.step, run.plan.origin.epoch, run.plan.origin.images],
        "weights": run.bare.head.weight.double().sum().item(),
    }


def images_of(outcomes: list, epoch: int) -> list[int]:
    notes = [note for outcome in outcomes for note in outcome.value["notes"] if note["epoch"] == epoch]
    return [image for note in notes for image in note["images"]]


def test_three_ranks_go_on_where_two_were_in_the_middle_of_an_epoch(run_ranks, tmp_path):
    """Eighteen images: two ranks take four steps an epoch, three take three. Two are stopped in the second epoch."""
    root = str(write_images(tmp_path / "images", train=6))
    two = run_ranks(first_ranks, world_size=2, root=root, steps=6)
    three = run_ranks(other_ranks, world_size=3, root=root)
    assert not any(outcome.error for outcome in two + three), three[0].traceback
    values = [outcome.value for outcome in three]
    assert all(value["changes"] == values[0]["changes"] for value in values)
    assert values[0]["changes"] == [
        "ranks 2 -> 3: from step 6 on not bit-identical",
        "dropout: every rank draws from a new stream, seeded by (seed, rank, step)",
        "global batch 4 -> 6 images (3 ranks cannot keep it); the peak lr stays",
        "steps left 6 -> 4, steps of an epoch 4 -> 3",
        "epoch 2 goes on after the 8 of its 18 images that were seen; its last 4 fill no step",
    ]
    assert [value["origin"] for value in values] == [[6, 1, 8]] * 3
    assert {value["step"] for value in values} == {6 + 1 + 3}
    second = images_of(two, 1) + images_of(three, 1)
    assert (len(second), len(set(second))) == (8 + 6, 14)  # nothing twice; what is left is less than a global batch
    assert sorted(images_of(three, 2)) == list(range(18))
    assert len({value["draws"] for value in values}) == 3
    assert len({value["weights"] for value in values}) == 1
    means = [sum(losses) / 2 for losses in zip(*(outcome.value["losses"] for outcome in two), strict=True)]
    for value in values:
        assert value["losses"] == torch.tensor(means).tolist()
        rates = [note["lr"] for note in value["notes"]]
        assert len(rates) == 4
        assert rates == sorted(rates, reverse=True)
        assert rates[0] < two[0].value["notes"][-1]["lr"]


def test_one_rank_that_keeps_the_global_batch_of_two_takes_the_same_steps(run_ranks, tmp_path):
    root = str(write_images(tmp_path / "images", train=6))
    whole = run_ranks(first_ranks, world_size=2, root=root, steps=99)
    for path in (tmp_path / "runs" / "tiny" / "test" / "checkpoints").iterdir():
        path.rename(tmp_path / path.name)  # out of the way of auto
    cut = run_ranks(first_ranks, world_size=2, root=root, steps=6)
    (alone,) = run_ranks(other_ranks, world_size=1, root=root, loop__batch_size_per_rank=4)
    assert not alone.error, alone.traceback
    assert alone.value["changes"][2:] == ["global batch 4 images, as before: the same images in the same steps"]
    assert alone.value["origin"] == [0, 0, 0]
    assert alone.value["step"] == whole[0].value["total"] == 12
    assert [note["lr"] for note in alone.value["notes"]] == [note["lr"] for note in whole[0].value["notes"][6:]]
    for mine, *theirs in zip(alone.value["notes"], *(outcome.value["notes"][6:] for outcome in whole), strict=True):
        assert sorted(mine["images"]) == sorted(image for note in theirs for image in note["images"])
    assert [outcome.value["notes"] for outcome in cut] == [outcome.value["notes"][:6] for outcome in whole]


def refused(accelerator, root: str) -> list[str]:
    """Other ranks with another rate; and as many as before, of which one has another model."""
    said = []
    for fields in ({"optimizer__lr": 0.5}, {}):
        config = tiny_config(root, **DROPOUT, schedule__epochs=3, resume="auto", **fields)
        run = build_tiny(config, wrapped=False)
        if not fields and accelerator.process_index == 1:
            run.bare.head = torch.nn.Linear(16, 4)
        before = run.bare.head.weight.detach().clone()
        try:
            restore(run, find_resume(config, run.accelerator))
        except CheckpointError as error:
            said.append(str(error))
        assert torch.equal(run.bare.head.weight, before)
        assert (run.step, len(run.optimizer.state)) == (0, 0)
    return said


def test_what_one_rank_refuses_all_refuse_and_none_is_half_restored(run_ranks, tmp_path):
    root = str(write_images(tmp_path / "images"))
    run_ranks(first_ranks, world_size=1, root=root, steps=1)
    for outcome in run_ranks(refused, world_size=2, root=root):
        assert not outcome.error, outcome.traceback
        rate, shape = outcome.value
        assert "optimizer.lr was 0.01 and is 0.5" in rate
        assert "head.weight is float32 (3, 16), the model's is float32 (4, 16)" in shape
        assert "(rank 1 of 2, resuming from model.safetensors)" in shape
