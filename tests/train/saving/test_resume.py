import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.train.tiny import build_tiny, same, tiny_config, weights, write_images
from train import step
from train.build import build_accelerator, wrap
from train.errors import CheckpointError
from train.optim import set_learning_rate
from train.run import Run
from train.saving import checkpoint
from train.saving.checkpoint import MODEL, OPTIMIZER, Resume, read_state
from train.saving.resume import choose_checkpoint, find_resume, restore, restore_random, save_checkpoint
from train.step import train_step
from zoo import plugins, registry

# MLflow's own, not ours to mend
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
DROPOUT = {"model__timm_kwargs": {"drop_rate": 0.3, "proj_drop_rate": 0.3}}


def go(run: Run, count: int) -> Run:
    for _, batches in zip(range(count), run.batches(), strict=False):
        train_step(run, batches)
    return run


def saved(run: Run) -> Path:
    save_checkpoint(run)
    return run.checkpoints / f"step-{run.step:08d}"


def at(path: Path) -> Resume:
    return Resume(path, read_state(path))


def resumed(config, path: Path) -> Run:
    run = build_tiny(config, wrapped=False)
    restore(run, at(path))
    wrap(run)
    restore_random(run, at(path))
    return run


@pytest.mark.parametrize("stop", [2, 6, 9])
def test_run_resumed_in_the_middle_or_at_the_end_of_an_epoch_ends_bit_for_bit_the_same(tiny, stop):
    """With dropout and accumulation; six steps an epoch."""
    config = tiny(**DROPOUT)
    straight = weights(go(build_tiny(config), 12))
    path = saved(go(build_tiny(config), stop))
    assert same(weights(go(resumed(config, path), 12)), straight)


@pytest.mark.slow
def test_run_with_data_workers_resumes_in_the_middle_of_an_epoch_bit_for_bit(tiny):
    """What they have drawn ahead of the stop is drawn again; and they change nothing."""
    straight = weights(go(build_tiny(tiny(**DROPOUT)), 12))
    config = tiny(**DROPOUT, data__num_workers=2)
    path = saved(go(build_tiny(config), 8))
    assert same(weights(go(resumed(config, path), 12)), straight)


PLUGIN = "import zoo\nfrom zoo.projections import SeparateProjection\n\n"
PLUGIN += "@zoo.register_attention('mine')\nclass Mine(SeparateProjection):\n    pass\n"


@pytest.mark.parametrize("edited", [False, True])
def test_a_plugin_may_move_but_not_change_between_two_runs(tiny, here, monkeypatch, edited):
    monkeypatch.setenv("ZOO_PLUGIN_FILES", "[]")
    built_in = dict(registry._ATTENTIONS)

    def configure(name: str, text: str):
        monkeypatch.setattr(registry, "_ATTENTIONS", dict(built_in))  # as in a new process
        monkeypatch.setattr(plugins, "_LOADED", [])
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text(text)
        return tiny(model__attention="mine", model__plugins=name)

    path = saved(go(build_tiny(configure("my_attention.py", PLUGIN)), 2))
    config = configure("elsewhere/my_attention.py", f"{PLUGIN}# edited\n" if edited else PLUGIN)
    if not edited:
        assert go(resumed(config, path), 12).step == 12
        return
    with pytest.raises(CheckpointError, match=r"model\.plugins was \['my_attention\.py \(SHA-256 .*and is \['my_att"):
        resumed(config, path)


def test_checkpoint_that_was_damaged_is_saved_again_when_its_step_comes(tiny, caplog):
    run = go(build_tiny(tiny()), 3)
    path = saved(run)
    (path / MODEL).write_bytes(b"half")
    run.saved = None  # as in another process that comes by
    save_checkpoint(run)
    assert read_state(path).step == 3
    assert "replacing a checkpoint that is not whole" in caplog.text
    assert [left.name for left in path.parent.iterdir()] == ["step-00000003"]


def test_whole_checkpoint_is_not_written_twice(tiny):
    run = go(build_tiny(tiny()), 3)
    before = (saved(run) / MODEL).stat().st_mtime_ns
    assert (saved(run) / MODEL).stat().st_mtime_ns == before
    run.saved = None
    assert (saved(run) / MODEL).stat().st_mtime_ns == before


def test_checkpoint_that_other_ranks_had_reached_is_replaced(tiny, caplog):
    """A run goes on from step 1 with other ranks than those that had been at step 2 before."""
    run = go(build_tiny(tiny()), 2)
    path = saved(run)
    state = read_state(path).model_copy(update={"world_size": 4})
    (path / "state.json").write_text(state.model_dump_json(), encoding="utf-8")
    run.saved = None
    save_checkpoint(run)
    assert read_state(path).world_size == 1
    assert "replacing a checkpoint of the same step that other ranks had reached" in caplog.text


def test_what_a_killed_process_left_is_cleared_before_the_next_is_written(tiny):
    run = go(build_tiny(tiny()), 1)
    for left in (run.folder / ".bundle.partial-7-ab", run.checkpoints / ".step-00000001.partial-7-cd"):
        left.mkdir(parents=True)
        (left / MODEL).write_bytes(b"half")
    saved(run)
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000001"]
    assert [path.name for path in run.folder.iterdir()] == ["checkpoints"]


def test_only_the_newest_are_kept(tiny):
    run = build_tiny(tiny(checkpoint__keep=2))
    for _ in range(4):
        saved(go(run, 1))
    assert [path.name for path in sorted(run.checkpoints.iterdir())] == ["step-00000003", "step-00000004"]


def test_auto_without_a_checkpoint_starts_anew(tiny):
    config = tiny(resume="auto")
    assert choose_checkpoint("auto", config.run_dir) is None
    assert not config.run_dir.exists()
    assert find_resume(config, build_accelerator(config.loop)) is None
    assert find_resume(tiny(), build_accelerator(config.loop)) is None


def test_path_that_is_missing_or_no_checkpoint_is_refused(tiny, here):
    run = go(build_tiny(tiny()), 1)
    path = saved(run)
    with pytest.raises(
        CheckpointError, match=r"resume none: no such directory; wanted RUN/checkpoints/step-\.\.\. or auto"
    ):
        choose_checkpoint("none", here)
    with pytest.raises(CheckpointError, match=r"test: no whole checkpoint, state\.json cannot be read"):
        choose_checkpoint(str(run.folder), here)
    (path / MODEL).unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: missing"):
        choose_checkpoint(str(path), here)


def test_checkpoint_is_hashed_once_and_its_state_is_what_was_verified(tiny, monkeypatch):
    path, hashed = saved(go(build_tiny(tiny()), 1)), []
    real = checkpoint.record_file
    monkeypatch.setattr(checkpoint, "record_file", lambda file: (hashed.append(file.name), real(file))[1])
    config = tiny(resume="auto")
    found = find_resume(config, build_accelerator(config.loop))
    assert found == at(path)
    hashed[:] = hashed[:3]  # `at` reads it too
    run = build_tiny(config, wrapped=False)
    restore(run, found)
    wrap(run)
    restore_random(run, found)
    assert sorted(hashed) == ["model.safetensors", "optimizer.safetensors", "rng.safetensors"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"optimizer__lr": 0.5}, r"optimizer\.lr was 0\.01 and is 0\.5: a resumed run goes on as it began"),
        ({"model__attention": "linear"}, r"model\.attention was 'parameter' and is 'linear'"),
        (
            {"loop__batch_size_per_rank": 3},
            r"loop\.batch_size_per_rank was 2 and is 3: .* with the number of ranks alone",
        ),
        ({"seed": 4}, "seed was 0 and is 4"),
    ],
)
def test_other_config_is_refused_and_the_run_left_alone(tiny, fields, said):
    path = saved(go(build_tiny(tiny()), 1))
    run = build_tiny(tiny(**fields), wrapped=False)
    before = weights(run)
    with pytest.raises(CheckpointError, match=said):
        restore(run, at(path))
    assert same(weights(run), before)
    assert run.step == 0


def cut(tensors: dict) -> None:
    del tensors["head.bias/exp_avg"], tensors["head.bias/exp_avg_sq"], tensors["head.bias/step"]


def widen(tensors: dict) -> None:
    tensors["head.bias"] = torch.zeros(5)


@pytest.mark.parametrize(
    ("name", "fault", "said"),
    [(OPTIMIZER, cut, r"holds no state of head\.bias"), (MODEL, widen, r"head\.bias is float32 \(5,\)")],
)
def test_checkpoint_that_does_not_fit_leaves_the_run_as_it_was(tiny, name, fault, said):
    found = at(saved(go(build_tiny(tiny()), 2)))
    tensors = load_file(found.path / name)
    fault(tensors)
    save_file(tensors, found.path / name)
    run = build_tiny(tiny(seed=0), wrapped=False)
    before, plan = weights(run), run.plan
    with pytest.raises(CheckpointError, match=said):
        restore(run, found)
    assert same(weights(run), before)
    assert (dict(run.optimizer.state), run.step, run.plan, run.saved) == ({}, 0, plan, None)


@pytest.mark.parametrize("scaler", [{"scale": 1.0}, {}])
def test_loss_scaler_comes_back_with_its_own_kinds_of_numbers(tiny, scaler):
    run = go(build_tiny(tiny()), 2)
    run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=3)
    found = at(saved(run))
    again = build_tiny(tiny(), wrapped=False)
    again.accelerator.scaler = torch.amp.GradScaler("cpu")
    if scaler:
        with pytest.raises(CheckpointError, match=r"the loss scaler's state is \['scale'\], wanted "):
            restore(again, Resume(found.path, found.state.model_copy(update={"scaler": scaler})))
    restore(again, found)
    state = again.accelerator.scaler.state_dict()
    assert (state["scale"], state["growth_interval"]) == (512.0, 3)
    assert isinstance(state["growth_interval"], int)  # torch takes no other
    run.accelerator.scaler = again.accelerator.scaler = None


def test_checkpoint_older_than_a_field_goes_on_where_the_field_changes_nothing(tiny):
    path = saved(go(build_tiny(tiny()), 1))
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    del state["config"]["tie"], state["config"]["data.on_bad_image"]
    (path / "state.json").write_text(json.dumps(state), encoding="utf-8")
    assert resumed(tiny(), path).step == 1
    tied = build_tiny(tiny(tie="blocks.0.norm1.weight = blocks.0.norm2.weight"), wrapped=False)
    with pytest.raises(CheckpointError, match=r"tie was \[\] and is \[\['blocks\.0\.norm1\.weight = "):
        restore(tied, at(path))


def test_other_classes_are_refused_with_both_counts(tiny, here):
    path = saved(go(build_tiny(tiny()), 1))
    root = write_images(here / "more" / "images", classes=("ash", "elm", "oak", "yew"))
    run = build_tiny(tiny_config(root), wrapped=False)
    with pytest.raises(
        CheckpointError, match=r"3 classes \(ash, elm, oak\), the data now has 4 \(ash, elm, oak, yew\)"
    ):
        restore(run, at(path))


def test_other_intervals_tracking_and_publishing_are_no_other_run(tiny, here):
    path = saved(go(build_tiny(tiny()), 1))
    run = resumed(
        tiny(
            log__every_steps=3,
            publish__enabled=False,
            tracking__experiment="another",
            evaluate__every_epochs=2,
            checkpoint__keep=7,
            output_dir=str(here / "elsewhere"),
            resume=str(path),
        ),
        path,
    )
    assert run.step == 1


def test_rates_are_set_by_the_step_and_not_kept_in_the_checkpoint(tiny, monkeypatch):
    config, given = tiny(), []
    monkeypatch.setattr(step, "set_learning_rate", lambda opt, lr: (given.append(lr), set_learning_rate(opt, lr)))
    go(build_tiny(config), 12)
    path = saved(go(build_tiny(config), 7))
    resumed_rates = len(given)
    go(resumed(config, path), 12)
    assert given[resumed_rates:] == given[7:12]


def test_random_states_are_restored_after_the_wrap_drew_its_own(tiny):
    run = go(build_tiny(tiny()), 1)
    path = saved(run)
    expected = torch.rand(3)
    again = build_tiny(tiny(), wrapped=False)
    restore(again, at(path))
    wrap(again)
    restore_random(again, at(path))
    assert torch.equal(torch.rand(3), expected)


def test_resuming_where_every_checkpoint_is_damaged_does_not_start_from_nothing(tiny):
    run = build_tiny(tiny())
    path = saved(run)
    (path / MODEL).unlink()
    with pytest.raises(CheckpointError, match=r"none of the 1 checkpoints below .*tiny is whole.* without --resume"):
        choose_checkpoint("auto", run.config.run_dir)
    shutil.rmtree(path)
    assert choose_checkpoint("auto", run.config.run_dir) is None
