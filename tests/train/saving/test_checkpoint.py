import errno
import json
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.train.tiny import build_tiny
from train.draws import rng_states
from train.errors import CheckpointError
from train.position import Origin
from train.run import Run
from train.saving import checkpoint
from train.saving.checkpoint import (
    MODEL,
    clear_litter,
    find_newest,
    find_whole,
    prune,
    read_state,
    write_checkpoint,
)
from train.saving.resume import describe_state, save_checkpoint
from train.step import train_step


@pytest.fixture
def run(tiny) -> Run:
    """A run after two steps, with a pair of tied matrices in its model."""
    run = build_tiny(tiny(model__timm_kwargs={"depth": 2}), wrapped=False)
    tie(run)
    run.model, run.optimizer = run.accelerator.prepare(run.bare, run.optimizer)
    for _, batches in zip(range(2), run.batches(), strict=False):
        train_step(run, batches)
    return run


def tie(run: Run) -> None:
    run.bare.blocks[1].mlp.fc1.weight = run.bare.blocks[0].mlp.fc1.weight
    run.optimizer = torch.optim.AdamW(run.bare.parameters(), lr=1e-2)


def write(run: Run, path: Path) -> Path:
    rng = {f"0.{kind}": state for kind, state in rng_states().items()}
    write_checkpoint(path, describe_state(run), run.bare, run.optimizer, rng)
    return path


def test_state_comes_back_with_each_number_as_it_was(run, here):
    told = {"val/loss": 0.1 + 0.2, "train/lr": 5e-324, "perf/images_per_s": float("inf")}
    given = {
        "losses": ((0.1, 1 / 3), (2.0,)),
        "pending": ((told, 7),),
        "origin": Origin(3, 1, 24),
        "scaler": {"a": 2.0},
    }
    state = describe_state(run).model_copy(update=given)
    write_checkpoint(here / "step-00000002", state, run.bare, run.optimizer, rng_states())
    back = read_state(here / "step-00000002")
    assert back == state.model_copy(update={"files": back.files, "saved_at": back.saved_at})
    assert back.pending[0][0]["val/loss"] == 0.30000000000000004


def test_state_of_an_older_checkpoint_lacks_what_is_younger(run, here):
    path = write(run, here / "step-00000002")
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    for key in ("losses", "pending", "origin"):
        del state[key]
    (path / "state.json").write_text(json.dumps(state), encoding="utf-8")
    assert (read_state(path).origin, read_state(path).losses, read_state(path).pending) == (Origin(), (), ())


def test_tied_matrix_is_written_once(run, here):
    names = load_file(write(run, here / "step-00000002") / "model.safetensors").keys()
    assert "blocks.0.mlp.fc1.weight" in names
    assert "blocks.1.mlp.fc1.weight" not in names


def test_folder_holds_safetensors_and_json_alone(run, here):
    path = write(run, here / "step-00000002")
    assert sorted(file.name for file in path.iterdir()) == [
        "model.safetensors",
        "optimizer.safetensors",
        "rng.safetensors",
        "state.json",
    ]
    for file in path.glob("*.safetensors"):
        load_file(file)
    assert json.loads((path / "state.json").read_text(encoding="utf-8"))["step"] == 2


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def edit_state(path: Path, **fields: object) -> None:
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    (path / "state.json").write_text(json.dumps(state | fields), encoding="utf-8")


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "rng.safetensors"])
@pytest.mark.parametrize(("fault", "said"), [(truncate, "damaged"), (flip_a_bit, "damaged"), (Path.unlink, "missing")])
def test_file_that_is_not_as_it_was_written_is_named(run, here, name, fault, said):
    path = write(run, here / "step-00000002")
    fault(path / name)
    with pytest.raises(CheckpointError, match=rf"step-00000002/{name}: {said}"):
        read_state(path)


def test_state_that_is_missing_foreign_cut_or_newer_is_named(run, here):
    path = write(run, here / "step-00000002")
    edit_state(path, format_version=2, scheduler={})
    with pytest.raises(CheckpointError, match=r"state\.json: .*format_version.* 2"):
        read_state(path)
    edit_state(path, format_version=1)
    with pytest.raises(CheckpointError, match=r"state\.json: .*scheduler"):
        read_state(path)
    (path / "state.json").write_text('{"epoch": 3}', encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"state\.json: not a checkpoint's state: run_id"):
        read_state(path)
    (path / "state.json").write_text('{"run_id": "a', encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"state\.json: not a checkpoint's state"):
        read_state(path)
    (path / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"no whole checkpoint, state\.json cannot be read \(No such file"):
        read_state(path)


def test_file_that_the_state_does_not_list_is_missing(run, here):
    path = write(run, here / "step-00000002")
    edit_state(path, files={})
    with pytest.raises(CheckpointError, match=r"model\.safetensors: missing"):
        read_state(path)


def test_full_disk_leaves_the_older_checkpoint_and_nothing_half_written(run, monkeypatch):
    save_checkpoint(run)
    real = checkpoint.save_file

    def save_file(tensors, path, metadata):
        if path.name == "optimizer.safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(tensors, path, metadata)

    monkeypatch.setattr(checkpoint, "save_file", save_file)
    train_step(run, next(run.batches()))
    with pytest.raises(CheckpointError, match=r"step-00000003: cannot be written \(.*No space left on device"):
        save_checkpoint(run)
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000002"]
    assert find_newest(run.config.run_dir) == run.checkpoints / "step-00000002"


def test_newest_whole_checkpoint_is_found_and_the_others_are_named(run, caplog):
    save_checkpoint(run)
    train_step(run, next(run.batches()))
    save_checkpoint(run)
    (run.checkpoints / ".step-00000004.partial-123").mkdir()  # what a killed process leaves
    folder = run.config.run_dir
    assert find_newest(folder) == run.checkpoints / "step-00000003"
    assert find_whole(folder).state == read_state(run.checkpoints / "step-00000003")
    truncate(run.checkpoints / "step-00000003" / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        assert find_newest(folder) == run.checkpoints / "step-00000002"
    assert "step-00000003/model.safetensors: damaged" in caplog.text
    assert "partial" not in caplog.text
    (run.checkpoints / "step-00000002" / "state.json").unlink()
    assert find_newest(folder) is None
    assert find_newest(folder / "none") is None


def test_checkpoint_that_another_run_removes_meanwhile_is_no_error(run, monkeypatch):
    save_checkpoint(run)
    gone = run.config.run_dir / "another" / "checkpoints" / "step-00000001"
    real = Path.glob
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [*real(self, pattern), gone])
    assert find_newest(run.config.run_dir) == run.checkpoints / "step-00000002"


def test_newest_is_by_time_over_runs_not_by_name(run):
    save_checkpoint(run)
    other = run.config.run_dir / "another" / "checkpoints" / "step-00000001"
    shutil.copytree(run.checkpoints / "step-00000002", other)
    said = json.loads((other / "state.json").read_text())
    (other / "state.json").write_text(json.dumps(said | {"saved_at": said["saved_at"] + 1}))
    assert find_newest(run.config.run_dir) == other


def test_copies_with_times_of_their_own_do_not_change_which_is_newest(run):
    save_checkpoint(run)
    train_step(run, next(run.batches()))
    save_checkpoint(run)
    os.utime(run.checkpoints / "step-00000002", ns=(2**62, 2**62))
    assert find_newest(run.config.run_dir) == run.checkpoints / "step-00000003"


def test_older_checkpoint_that_does_not_say_when_goes_by_its_folder(run):
    save_checkpoint(run)
    train_step(run, next(run.batches()))
    save_checkpoint(run)
    for second, path in enumerate(sorted(run.checkpoints.iterdir(), reverse=True)):
        said = json.loads((path / "state.json").read_text())
        del said["saved_at"]
        (path / "state.json").write_text(json.dumps(said))
        os.utime(path, (second, second))
    assert find_newest(run.config.run_dir) == run.checkpoints / "step-00000002"


def make(folder: Path, *steps: int) -> Path:
    """Make empty checkpoints of these steps, one after the other; return the last."""
    for second, step in enumerate(steps):
        path = folder / f"step-{step:08d}"
        path.mkdir()
        os.utime(path, (second, second))
    return path


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir())


def test_prune_keeps_the_newest(tmp_path):
    newest = make(tmp_path, 2, 9, 10, 30)
    prune(newest, keep=5)
    assert steps_in(tmp_path) == [2, 9, 10, 30]
    prune(newest, keep=2)
    assert steps_in(tmp_path) == [10, 30]
    prune(newest, keep=1)
    assert steps_in(tmp_path) == [30]


@pytest.mark.parametrize(("keep", "left"), [(1, [6]), (2, [6, 9]), (3, [3, 6, 9])])
def test_prune_never_removes_what_was_just_written_behind_which_a_resumed_run_had_been(tmp_path, keep, left):
    prune(make(tmp_path, 3, 9, 6), keep=keep)
    assert steps_in(tmp_path) == left


def test_kill_within_prune_leaves_no_half_of_a_checkpoint(tmp_path, monkeypatch):
    (tmp_path / "checkpoints").mkdir()
    newest = make(tmp_path / "checkpoints", 1, 2)
    (tmp_path / "checkpoints" / "step-00000001" / MODEL).write_text("weights")

    def die(_path):
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", die)
    with pytest.raises(KeyboardInterrupt):
        prune(newest, keep=1)
    monkeypatch.undo()
    assert [path.name for path in newest.parent.glob("step-*")] == ["step-00000002"]
    assert len(list(newest.parent.iterdir())) == 2
    (tmp_path / ".bundle.partial-7-ab").mkdir()
    clear_litter(tmp_path)
    assert [path.name for path in newest.parent.iterdir()] == ["step-00000002"]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_old_checkpoint_that_cannot_be_removed_is_a_warning(tmp_path, monkeypatch, caplog):
    newest = make(tmp_path, 1, 2)

    def refuse(path):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))

    monkeypatch.setattr(checkpoint, "remove_directory", refuse)
    prune(newest, keep=1)
    assert "an old checkpoint cannot be removed: " in caplog.text
    assert "step-00000001" in caplog.text
