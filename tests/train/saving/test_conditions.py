import pytest

from tests.train.tiny import build_tiny
from train.errors import CheckpointError
from train.position import EpochPlan, Origin
from train.run import Run
from train.saving.checkpoint import CheckpointState
from train.saving.conditions import check_resumable, describe_changes, find_saved_plan, is_same_training
from train.saving.resume import describe_state


@pytest.fixture
def run(tiny) -> Run:
    return build_tiny(tiny(model__timm_kwargs={"depth": 2}), wrapped=False)


def change(state: CheckpointState, **fields: object) -> CheckpointState:
    return state.model_copy(update=fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
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
        "watch.timeout_s": 60.0,
    }
    assert free.keys() <= state.config.keys()
    check_resumable(here, state, change(state, config=state.config | free))


BATCH = {"loop.batch_size_per_rank": 5, "loop.accumulation_steps": 3}


@pytest.mark.parametrize("key", BATCH)
def test_batch_may_change_with_the_number_of_ranks_alone(run, here, key):
    state = describe_state(run)
    config = state.config | {key: BATCH[key]}
    check_resumable(here, state, change(state, config=config, world_size=4, steps_per_epoch=1))
    with pytest.raises(CheckpointError, match=rf"{key} was .* \({key} may change with the number of ranks alone\)"):
        check_resumable(here, state, change(state, config=config, steps_per_epoch=1))


def test_other_ranks_may_change_nothing_else(run, here):
    state = describe_state(run)
    check_resumable(here, state, change(state, world_size=4, steps_per_epoch=1))
    with pytest.raises(CheckpointError, match=r"optimizer\.lr was 0\.01 and is 0\.5: a resumed run"):
        check_resumable(here, state, change(state, world_size=4, config=state.config | {"optimizer.lr": 0.5}))
    with pytest.raises(CheckpointError, match=r"training images were .* and are beef"):
        check_resumable(here, state, change(state, world_size=4, train_fingerprint="beef"))


@pytest.mark.parametrize(
    "fields",
    [{"run_id": "other"}, {"step": 1}, {"world_size": 2}, {"origin": Origin(1, 0, 2)}, {"config": {"seed": 1}}],
)
def test_same_training_is_the_same_step_of_the_same_ranks(run, fields):
    state = describe_state(run)
    assert is_same_training(state, change(state, config=state.config | {"output_dir": "elsewhere"}))
    assert not is_same_training(state, change(state, **fields))


def taken_over(run: Run, step: int, world_size: int, batch_size: int) -> list[str]:
    """Say what changes when ranks take over a run of two, each with 2 images of the 36, after `step` steps."""
    state = change(describe_state(run), world_size=2, step=step)
    now = change(state, world_size=world_size, config=state.config | {"loop.batch_size_per_rank": batch_size})
    before = find_saved_plan(state, num_images=36)
    assert before == EpochPlan(36, 4, 2)
    return describe_changes(state, now, before, before.go_on_as(batch_size * world_size, step))


def test_as_many_ranks_change_nothing(run):
    assert taken_over(run, 3, 2, 2) == []


def test_other_ranks_are_told_all_that_changes_and_the_flag_that_would_keep_the_batch(run):
    assert taken_over(run, 13, 4, 4) == [
        "ranks 2 -> 4: from step 13 on not bit-identical",
        "dropout: every rank draws from a new stream, seeded by (seed, rank, step)",
        "global batch 4 -> 16 images (--loop.batch_size_per_rank 1 would keep it); the peak lr stays",
        "steps left 5 -> 1, steps of an epoch 9 -> 2",
        "epoch 2 goes on after the 16 of its 36 images that were seen; its last 4 fill no step",
    ]


def test_other_ranks_with_the_same_global_batch_see_the_same_images(run):
    assert taken_over(run, 13, 4, 1)[2:] == ["global batch 4 images, as before: the same images in the same steps"]


def test_three_ranks_cannot_keep_every_batch_and_an_epochs_end_needs_no_word(run):
    assert taken_over(run, 9, 3, 2)[2:] == [
        "global batch 4 -> 6 images (3 ranks cannot keep it); the peak lr stays",
        "steps left 9 -> 6, steps of an epoch 9 -> 6",
    ]
