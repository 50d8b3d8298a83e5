import errno
import json
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.train.tiny import build_tiny, same, weights
from train import checkpoint
from train.checkpoint import (
    CheckpointState,
    check_resumable,
    find_newest,
    load_rng,
    load_weights,
    optimizer_tensors,
    prune,
    read_state,
    restore_rng,
    rng_states,
    write_checkpoint,
)
from train.errors import CheckpointError
from train.resume import describe_state, save_checkpoint
from train.run import Run
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


def test_weights_optimizer_and_random_states_come_back_bit_for_bit(run, tiny, here):
    path = write(run, here / "step-00000002")
    expected = torch.rand(5)
    fresh = build_tiny(tiny(model__timm_kwargs={"depth": 2}, seed=1), wrapped=False)
    tie(fresh)
    assert not same(weights(fresh), weights(run))
    load_weights(path, fresh.bare, fresh.optimizer)
    assert same(weights(fresh), weights(run))
    assert fresh.bare.blocks[1].mlp.fc1.weight is fresh.bare.blocks[0].mlp.fc1.weight
    saved = optimizer_tensors(run.bare, run.optimizer)
    assert {name.rpartition("/")[2] for name in saved} == {"step", "exp_avg", "exp_avg_sq"}
    assert same(optimizer_tensors(fresh.bare, fresh.optimizer), saved)
    restore_rng(load_rng(path, 0))
    assert torch.equal(torch.rand(5), expected)


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
    truncate(run.checkpoints / "step-00000003" / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        assert find_newest(folder) == run.checkpoints / "step-00000002"
    assert "step-00000003/model.safetensors: damaged" in caplog.text
    assert "partial" not in caplog.text
    (run.checkpoints / "step-00000002" / "state.json").unlink()
    assert find_newest(folder) is None
    assert find_newest(folder / "none") is None


def test_newest_is_by_time_over_runs_not_by_name(run):
    save_checkpoint(run)
    other = run.config.run_dir / "another" / "checkpoints" / "step-00000001"
    shutil.copytree(run.checkpoints / "step-00000002", other)
    os.utime(other, ns=(2**62, 2**62))
    assert find_newest(run.config.run_dir) == other


def test_prune_keeps_the_newest(tmp_path):
    for step in (2, 10, 9, 30):
        (tmp_path / f"step-{step:08d}").mkdir()
    prune(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000030"]
    prune(tmp_path, keep=5)
    assert len(list(tmp_path.iterdir())) == 2


def test_weights_of_another_shape_and_foreign_optimizer_names_are_refused(run, tiny, here):
    path = write(run, here / "step-00000002")
    wider = build_tiny(tiny(model__timm_kwargs={"depth": 2, "embed_dim": 32}), wrapped=False)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: does not fit the model: .*pos_embed"):
        load_weights(path, wider.bare, wider.optimizer)


def test_rng_of_a_rank_that_did_not_write_is_named(run, here):
    path = write(run, here / "step-00000002")
    with pytest.raises(CheckpointError, match=r"rng\.safetensors: .*rank 3"):
        restore_rng(load_rng(path, 3))


def change(state: CheckpointState, **fields: object) -> CheckpointState:
    return state.model_copy(update=fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"world_size": 4}, "ranks were 1 and are 4"),
        ({"train_fingerprint": "beef"}, "training images were .* and are beef"),
        ({"steps_per_epoch": 5}, "steps an epoch were 6 and are 5"),
        ({"class_names": ("ash", "elm")}, r"3 classes \(ash, elm, oak\), the data now has 2 \(ash, elm\)"),
        ({"class_names": ("oak", "elm", "ash")}, "3 classes .* now has 3"),
    ],
)
def test_other_conditions_are_named_then_and_now(run, here, fields, said):
    state = describe_state(run)
    with pytest.raises(CheckpointError, match=said):
        check_resumable(here, state, change(state, **fields))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("optimizer.lr", 0.5, r"optimizer\.lr was 0\.01 and is 0\.5"),
        ("model.attention", "linear", r"model\.attention was 'parameter' and is 'linear'"),
        ("model.timm_kwargs.depth", 3, r"model\.timm_kwargs\.depth was 2 and is 3"),
        ("schedule.epochs", 9, r"schedule\.epochs was 2 and is 9"),
        ("seed", 5, "seed was 0 and is 5"),
        ("freeze", ["head"], r"freeze was \[\] and is \['head'\]"),
    ],
)
def test_other_field_is_named_with_was_and_is(run, here, key, value, said):
    state = describe_state(run)
    with pytest.raises(CheckpointError, match=said):
        check_resumable(here, state, change(state, config=state.config | {key: value}))


def test_fields_that_change_nothing_of_the_training_may_differ(run, here):
    state = describe_state(run)
    free = {
        "output_dir": "elsewhere",
        "resume": "auto",
        "log.every_steps": 7,
        "tracking.uri": "sqlite:///other.db",
        "publish.force": True,
        "checkpoint.keep": 9,
        "evaluate.every_epochs": 2,
        "data.num_workers": 3,
    }
    assert free.keys() <= state.config.keys()
    check_resumable(here, state, change(state, config=state.config | free))
