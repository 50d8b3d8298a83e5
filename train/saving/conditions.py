"""Whether a run may go on from a checkpoint, and what changes where other ranks take it over."""

from pathlib import Path

from train.config import DataConfig, ModelConfig, TrainConfig
from train.errors import CheckpointError
from train.position import EpochPlan
from train.saving.checkpoint import CheckpointState
from train.tracking import flatten

_AS_IT_BEGAN = "a resumed run goes on as it began; set it back, or start anew without --resume"
_FREE = (
    *("output_dir", "resume", "log.", "tracking.", "publish.", "checkpoint.", "evaluate.", "watch."),
    "data.num_workers",
)
_BATCH = ("loop.batch_size_per_rank", "loop.accumulation_steps")  # may change together with the number of ranks


def fill_in(state: CheckpointState, now: CheckpointState) -> CheckpointState:
    """Return a checkpoint's state with the default of every field of `now` that is younger than the checkpoint."""
    least = TrainConfig(name="x", model=ModelConfig(backbone="x"), data=DataConfig(root="x"))
    defaults = flatten(least.model_dump(mode="json"))
    younger = {key: defaults[key] for key in now.config.keys() - state.config.keys() if key in defaults}
    return state.model_copy(update={"config": state.config | younger})


def check_resumable(path: Path, state: CheckpointState, now: CheckpointState) -> None:
    """Refuse to go on under other conditions than the checkpoint was written under.

    Another number of ranks is allowed, and with it another batch: see `describe_changes`.

    Args:
        path: The checkpoint, for the message.
        state: What it says of itself.
        now: The same of this run.

    Raises:
        CheckpointError: Names what differs, then and now.
    """
    if state.class_names != now.class_names:
        raise CheckpointError(
            f"{path}: was trained on {len(state.class_names)} classes ({_few(state.class_names)}), the data now has "
            f"{len(now.class_names)} ({_few(now.class_names)}): resume on the same data, or start a new run"
        )
    if state.train_fingerprint != now.train_fingerprint:
        raise CheckpointError(
            f"{path}: training images were {state.train_fingerprint} and are {now.train_fingerprint}: {_AS_IT_BEGAN}"
        )
    same_world = state.world_size == now.world_size
    differing = _find_differing(state, now, () if same_world else _BATCH)
    if differing:
        alone = [key for key in differing if key in _BATCH]
        hint = f" ({' and '.join(alone)} may change with the number of ranks alone)" if alone else ""
        said = "; ".join(f"{key} was {state.config.get(key)!r} and is {now.config.get(key)!r}" for key in differing)
        raise CheckpointError(f"{path}: {said}: {_AS_IT_BEGAN}{hint}")
    if same_world and state.steps_per_epoch != now.steps_per_epoch:
        raise CheckpointError(
            f"{path}: steps an epoch were {state.steps_per_epoch} and are {now.steps_per_epoch}: {_AS_IT_BEGAN}"
        )


def is_same_training(left: CheckpointState, right: CheckpointState) -> bool:
    """Say whether two checkpoints are of the same step of the same training, reached with the same ranks."""
    who = [(one.run_id, one.step, one.world_size, one.origin) for one in (left, right)]
    return who[0] == who[1] and not _find_differing(left, right)


def find_saved_plan(state: CheckpointState, num_images: int) -> EpochPlan:
    """Return how steps lay in epochs for the ranks that wrote a checkpoint on so many training images."""
    batch_size, accumulation_steps, epochs = (int(str(state.config[key])) for key in (*_BATCH, "schedule.epochs"))
    return EpochPlan(num_images, batch_size * accumulation_steps * state.world_size, epochs, state.origin)


def describe_changes(state: CheckpointState, now: CheckpointState, before: EpochPlan, after: EpochPlan) -> list[str]:
    """Say in a few lines what changes with the number of ranks; nothing where that is the same.

    Args:
        state: What the checkpoint says of itself.
        now: The same of this run.
        before: How steps lay in epochs for the ranks that wrote the checkpoint.
        after: How they lie in them now.
    """
    if state.world_size == now.world_size:
        return []
    size, old_size = after.global_batch_size, before.global_batch_size
    lines = [f"ranks {state.world_size} -> {now.world_size}: from step {state.step} on not bit-identical"]
    lines.append("dropout: every rank draws from a new stream, seeded by (seed, rank, step)")
    if size == old_size:
        return [*lines, f"global batch {size} images, as before: the same images in the same steps"]
    lines.append(f"global batch {old_size} -> {size} images ({_how_to_keep(old_size, now)}); the peak lr stays")
    left, old_left = after.total_steps - state.step, before.total_steps - state.step
    lines.append(
        f"steps left {old_left} -> {left}, steps of an epoch {before.steps_per_epoch} -> {after.steps_per_epoch}"
    )
    epoch, images = before.locate(state.step)
    if images:
        dropped = (after.num_images - images) % size
        lines.append(
            f"epoch {epoch + 1} goes on after the {images} of its {after.num_images} images that were seen; "
            f"its last {dropped} fill no step"
        )
    return lines


def _how_to_keep(global_batch_size: int, now: CheckpointState) -> str:
    ranks = now.world_size * int(str(now.config["loop.accumulation_steps"]))
    if global_batch_size % ranks == 0:
        return f"--loop.batch_size_per_rank {global_batch_size // ranks} would keep it"
    return f"{now.world_size} ranks cannot keep it"


def _find_differing(state: CheckpointState, now: CheckpointState, allowed: tuple[str, ...] = ()) -> list[str]:
    """Return the fields that matter to the training and differ, but for those that are allowed to."""
    return [
        key
        for key in sorted(state.config.keys() | now.config.keys())
        if state.config.get(key) != now.config.get(key) and key not in allowed and not key.startswith(_FREE)
    ]


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
