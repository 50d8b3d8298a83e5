import json
from pathlib import Path

import mlflow
import pytest
import torch

from tests.train.tiny import build_tiny, same, swapped, tiny_config, weights, write_images
from train import loop, step
from train.build import build_accelerator, wrap
from train.checkpoint import MODEL, find_newest, read_state
from train.errors import CheckpointError
from train.job import run_job
from train.optim import set_learning_rate
from train.resume import choose_checkpoint, find_resume, restore, restore_random, save_checkpoint
from train.run import Run
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


def resumed(config, path: Path) -> Run:
    run = build_tiny(config, wrapped=False)
    restore(run, path)
    wrap(run)
    restore_random(run, path)
    return run


@pytest.mark.parametrize("stop", [2, 6, 9])
def test_run_resumed_in_the_middle_or_at_the_end_of_an_epoch_ends_bit_for_bit_the_same(tiny, stop):
    """With dropout and accumulation; six steps an epoch."""
    config = tiny(**DROPOUT)
    straight = weights(go(build_tiny(config), 12))
    path = saved(go(build_tiny(config), stop))
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
    save_checkpoint(run)
    assert read_state(path).step == 3
    assert "replacing a checkpoint that is not whole" in caplog.text


def test_whole_checkpoint_is_not_written_twice(tiny):
    run = go(build_tiny(tiny()), 3)
    before = (saved(run) / MODEL).stat().st_mtime_ns
    assert (saved(run) / MODEL).stat().st_mtime_ns == before


def test_only_the_newest_are_kept(tiny):
    run = build_tiny(tiny(checkpoint__keep=2))
    for _ in range(4):
        saved(go(run, 1))
    assert [path.name for path in sorted(run.checkpoints.iterdir())] == ["step-00000003", "step-00000004"]


def test_auto_without_a_checkpoint_starts_anew(tiny):
    config = tiny(resume="auto")
    assert choose_checkpoint("auto", config.run_dir) is None
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


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"optimizer__lr": 0.5}, r"optimizer\.lr was 0\.01 and is 0\.5: a resumed run goes on as it began"),
        ({"model__attention": "linear"}, r"model\.attention was 'parameter' and is 'linear'"),
        ({"loop__batch_size_per_rank": 3}, "steps an epoch were 6 and are 4"),
        ({"seed": 4}, "seed was 0 and is 4"),
    ],
)
def test_other_config_is_refused_and_the_run_left_alone(tiny, fields, said):
    path = saved(go(build_tiny(tiny()), 1))
    run = build_tiny(tiny(**fields), wrapped=False)
    before = weights(run)
    with pytest.raises(CheckpointError, match=said):
        restore(run, path)
    assert same(weights(run), before)
    assert run.step == 0


def test_checkpoint_older_than_a_field_goes_on_where_the_field_changes_nothing(tiny):
    path = saved(go(build_tiny(tiny()), 1))
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    del state["config"]["tie"], state["config"]["data.on_bad_image"]
    (path / "state.json").write_text(json.dumps(state), encoding="utf-8")
    assert resumed(tiny(), path).step == 1
    tied = build_tiny(tiny(tie="blocks.0.norm1.weight = blocks.0.norm2.weight"), wrapped=False)
    with pytest.raises(CheckpointError, match=r"tie was \[\] and is \[\['blocks\.0\.norm1\.weight = "):
        restore(tied, path)


def test_other_classes_are_refused_with_both_counts(tiny, here):
    path = saved(go(build_tiny(tiny()), 1))
    root = write_images(here / "more" / "images", classes=("ash", "elm", "oak", "yew"))
    run = build_tiny(tiny_config(root), wrapped=False)
    with pytest.raises(
        CheckpointError, match=r"3 classes \(ash, elm, oak\), the data now has 4 \(ash, elm, oak, yew\)"
    ):
        restore(run, path)


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
    """Train nine steps straight; the same, cut off at step 5 and resumed from the checkpoint after step 3."""
    fields = {**DROPOUT, "schedule__epochs": 3, "publish__enabled": False, "checkpoint__keep": 9}
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


@pytest.mark.slow
def test_two_ranks_cut_off_between_checkpoints_end_as_if_they_had_not_been(run_ranks, tracked, here):
    tracked()
    outcomes = run_ranks(straight_and_resumed, root=str(here / "images"), folder=str(here))
    assert not any(outcome.error for outcome in outcomes), outcomes[0].traceback
    for outcome in outcomes:
        done, cut, resumed_end, refused = outcome.value["ends"]
        assert (done, cut, resumed_end) == ("done", "PowerCutError: planned", "done")
        assert refused.startswith("CheckpointError: ")
        assert "optimizer.lr was 0.01 and is 0.5" in refused
        for kind in ("images", "rates"):
            straight, first, after = (outcome.value[kind][name] for name in ("straight", "cut", "after"))
            assert list(straight) == [str(step) for step in range(9)]
            assert list(first) == ["0", "1", "2", "3", "4"]
            assert list(after) == ["3", "4", "5", "6", "7", "8"]
            assert first | after == straight
    mine, theirs = (outcome.value["images"]["straight"] for outcome in outcomes)
    assert not {i for images in mine.values() for i in images} & {i for images in theirs.values() for i in images}

    a, b = find_newest(here / "a" / "tiny"), find_newest(here / "b" / "tiny")
    for file in (MODEL, "optimizer.safetensors", "rng.safetensors"):
        assert (a / file).read_bytes() == (b / file).read_bytes(), file
    assert {path.name for path in b.parent.iterdir()} == {"step-00000003", "step-00000006", "step-00000009"}

    client = mlflow.MlflowClient(f"sqlite:///{here}/mlflow.db")
    experiment = client.get_experiment_by_name("attention-zoo")
    runs = client.search_runs([experiment.experiment_id])
    assert sorted(run.info.run_id for run in runs) == sorted([a.parts[-3], b.parts[-3]])
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert json.loads((b / "state.json").read_text())["run_id"] == b.parts[-3]
    for run_id in (a.parts[-3], b.parts[-3]):
        for key in ("train/loss", "train/lr"):
            steps = [metric.step for metric in client.get_metric_history(run_id, key)]
            assert steps == list(range(1, 10)), key
        assert [m.step for m in client.get_metric_history(run_id, "val/top1")] == [3, 6, 9]


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
    restore(again, path)
    wrap(again)
    restore_random(again, path)
    assert torch.equal(torch.rand(3), expected)
