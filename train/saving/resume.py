"""Save a run's checkpoints, and go on from one: the collective half of `train.saving.checkpoint`.

The main process alone reads and writes; the others hear from it, so their machines need not see the folder.
"""

import logging
from pathlib import Path
from typing import cast

import torch
from accelerate import Accelerator

from train.config import TrainConfig
from train.draws import mix_seed, restore_rng, rng_states
from train.errors import CheckpointError
from train.ranks import gather_json, together
from train.run import Run
from train.saving import checkpoint, loading
from train.saving.checkpoint import MODEL, OPTIMIZER, RNG, CheckpointState, Resume
from train.saving.conditions import check_resumable, describe_changes, fill_in, find_saved_plan, is_same_training
from train.saving.loading import Layout
from train.tracking import flatten
from zoo.files.durable import remove_directory

logger = logging.getLogger(__name__)

_TAKEN_OVER = 2  # keeps the seeds of streams that begin anew apart from augmentation's and the order's
_OWN_WORDS = ("python", "numpy")  # random states that are numbers and not bytes


def describe_state(run: Run) -> CheckpointState:
    """Say what a checkpoint of this run, taken now, says of itself; the other ranks' losses are left out."""
    scaler = run.accelerator.scaler
    config = flatten(run.config.model_dump(mode="json"))
    del config["model.plugins"]  # by what is in them: a file may move between two runs, and it may change
    if run.card.plugins:
        config["model.plugins"] = [f"{plugin.name} (SHA-256 {plugin.sha256})" for plugin in run.card.plugins]
    return CheckpointState(
        run_id=run.folder.name,
        step=run.step,
        steps_per_epoch=run.steps_per_epoch,
        world_size=run.accelerator.num_processes,
        config=config,
        class_names=run.data.class_names,
        train_fingerprint=run.data.train_fingerprint,
        scaler={} if scaler is None else {key: float(value) for key, value in scaler.state_dict().items()},
        origin=run.plan.origin,
        pending=tuple((dict(metrics), step) for metrics, step in run.tracker.pending()),
    )


def save_checkpoint(run: Run) -> None:
    """Save the run as it stands, from the main process, and drop the oldest; all ranks together, after any step.

    Saved already, it stays as it is: so it may be called again at the end.

    Raises:
        CheckpointError: On every rank, if the main process cannot write it.
    """
    accelerator, path = run.accelerator, run.checkpoints / f"step-{run.step:08d}"
    random = {kind: state.tolist() for kind, state in rng_states().items()}
    gathered = gather_json({"random": random, "losses": run.meter.state()}, accelerator)
    with together(accelerator, "saving a checkpoint"):
        if accelerator.is_main_process and not (run.saved == path and path.is_dir()):
            _save(run, path, cast(list[dict[str, object]], gathered))
    run.saved = path


def _save(run: Run, path: Path, gathered: list[dict[str, object]]) -> None:
    """Write the checkpoint, unless the same training has left it there, and only then remove the oldest."""
    losses = tuple(tuple(cast(list[float], rank["losses"])) for rank in gathered)
    state = describe_state(run).model_copy(update={"losses": losses})
    checkpoint.clear_litter(run.folder)
    if not _is_saved(path, state):
        rng = {
            f"{rank}.{kind}": torch.tensor(numbers, dtype=torch.float64 if kind in _OWN_WORDS else torch.uint8)
            for rank, told in enumerate(gathered)
            for kind, numbers in cast(dict[str, list[float]], told["random"]).items()
        }
        checkpoint.write_checkpoint(path, state, run.bare, run.optimizer, rng)
    checkpoint.prune(path, run.config.checkpoint.keep)


def _is_saved(path: Path, state: CheckpointState) -> bool:
    """Say whether this state stands at `path`, whole; what else stands there is removed, with a warning."""
    if not path.exists():
        return False
    try:
        if is_same_training(checkpoint.read_state(path), state):
            return True
        logger.warning("replacing a checkpoint of the same step that other ranks had reached: %s", path)
    except CheckpointError as error:
        logger.warning("replacing a checkpoint that is not whole: %s", error)
    remove_directory(path)
    return False


def find_resume(config: TrainConfig, accelerator: Accelerator) -> Resume | None:
    """Return the checkpoint that `resume` names, found and verified by the main process for all; None to start anew.

    Raises:
        CheckpointError: If a path is named that is no whole checkpoint.
    """
    found: Resume | None = None
    with together(accelerator, "finding the checkpoint"):
        if accelerator.is_main_process and config.resume is not None:
            found = choose_checkpoint(config.resume, config.run_dir)
    told = None if found is None else {"path": str(found.path), "state": found.state.model_dump_json()}
    heard = cast(dict[str, str] | None, gather_json(told, accelerator)[0])
    if heard is None:
        return None
    return Resume(Path(heard["path"]), CheckpointState.model_validate_json(heard["state"]))


def choose_checkpoint(resume: str, run_dir: Path) -> Resume | None:
    """Return the checkpoint meant by "auto" (None where there is none yet) or by a path, verified."""
    if resume == "auto":
        found = checkpoint.find_whole(run_dir)
        if found is None and (damaged := checkpoint.list_checkpoints(run_dir)):
            raise CheckpointError(
                f"resume auto: none of the {len(damaged)} checkpoints below {run_dir} is whole (the warnings above say "
                "what is wrong); mend one, or start anew without --resume"
            )
        where = f"from {found.path}" if found else f"found no checkpoint below {run_dir}: a new run"
        logger.info("resume=auto %s", where)
        return found
    if not Path(resume).is_dir():
        raise CheckpointError(f"resume {resume}: no such directory; wanted RUN/checkpoints/step-... or auto")
    return Resume(Path(resume), checkpoint.read_state(Path(resume)))


def restore(run: Run, resume: Resume) -> list[str]:
    """Put a run where a checkpoint left it: weights, optimizer, loss scaler, step, place in the data. Before the wrap.

    The random states come last, by `restore_random`: building and wrapping draw from them.

    Returns:
        What changes with the number of ranks, in a line each; nothing where the ranks are as many.

    Raises:
        CheckpointError: On every rank, if the checkpoint was written under other conditions, or does not fit; the run
            is then as it was.
    """
    path, accelerator = resume.path, run.accelerator
    with together(accelerator, "resuming"):
        now = describe_state(run)
        state = fill_in(resume.state, now)
        check_resumable(path, state, now)
        scaler = _find_scaler_state(run, resume)
    before = find_saved_plan(state, run.plan.num_images)

    def check_optimizer(layout: Layout) -> None:
        loading.check_optimizer(layout, path / OPTIMIZER, run.bare, run.optimizer)

    def check_model(layout: Layout) -> None:
        loading.check_model(layout, path / MODEL, run.bare)

    weights = loading.fetch(path / MODEL, accelerator, check_model)
    slots = loading.fetch(path / OPTIMIZER, accelerator, check_optimizer)
    loading.load_model(run.bare, weights)
    loading.load_optimizer(run.bare, run.optimizer, slots)
    if scaler:
        accelerator.scaler.load_state_dict(scaler)
    run.step, run.saved = state.step, path
    run.plan = before.go_on_as(run.plan.global_batch_size, state.step)
    run.meter.restore(_find_losses(state, accelerator), accelerator.device)
    return describe_changes(state, now, before, run.plan)


def restore_random(run: Run, resume: Resume) -> None:
    """Give each rank the random states that it saved; other ranks than saved them all begin new ones. All ranks."""
    rank = run.accelerator.process_index
    if resume.state.world_size != run.accelerator.num_processes:
        torch.manual_seed(mix_seed(run.config.seed, _TAKEN_OVER, rank, resume.state.step))
        return

    def check(layout: Layout) -> None:
        if f"{rank}.cpu" not in layout:
            raise CheckpointError(f"{resume.path / RNG}: holds no random state of rank {rank}")

    found = loading.fetch(resume.path / RNG, run.accelerator, check)
    prefix = f"{rank}."
    restore_rng({key.removeprefix(prefix): value.cpu() for key, value in found.items() if key.startswith(prefix)})


def _find_scaler_state(run: Run, resume: Resume) -> dict[str, float]:
    """Return the loss scaler's saved state with its own kinds of numbers, empty where either has none."""
    if run.accelerator.scaler is None or not resume.state.scaler:
        return {}
    own, saved = run.accelerator.scaler.state_dict(), resume.state.scaler
    if own.keys() != saved.keys():
        raise CheckpointError(f"{resume.path}: the loss scaler's state is {sorted(saved)}, wanted {sorted(own)}")
    return {key: type(value)(saved[key]) for key, value in own.items()}


def _find_losses(state: CheckpointState, accelerator: Accelerator) -> list[float]:
    """Return the losses since the last record: this rank's own, or on other ranks than saved them the mean of all."""
    if not state.losses:  # an older checkpoint
        return []
    if state.world_size == accelerator.num_processes:
        return list(state.losses[accelerator.process_index])
    return [sum(step) / len(step) for step in zip(*state.losses, strict=True)]
