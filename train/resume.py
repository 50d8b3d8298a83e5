"""Save a run's checkpoints, and go on from one: the collective half of `train.checkpoint`."""

import logging
from pathlib import Path
from typing import cast

import torch
from accelerate import Accelerator

from train import checkpoint
from train.checkpoint import CheckpointState
from train.config import DataConfig, ModelConfig, TrainConfig
from train.errors import CheckpointError
from train.ranks import gather_json, together
from train.run import Run
from train.tracking import flatten

logger = logging.getLogger(__name__)


def describe_state(run: Run) -> CheckpointState:
    """Say what a checkpoint of this run, taken now, says of itself."""
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
    )


def fill_in(state: CheckpointState, now: CheckpointState) -> CheckpointState:
    """Return a checkpoint's state with the default of every field of `now` that is younger than the checkpoint."""
    least = TrainConfig(name="x", model=ModelConfig(backbone="x"), data=DataConfig(root="x"))
    defaults = flatten(least.model_dump(mode="json"))
    younger = {key: defaults[key] for key in now.config.keys() - state.config.keys() if key in defaults}
    return state.model_copy(update={"config": state.config | younger})


def save_checkpoint(run: Run) -> None:
    """Save the run as it stands, from the main process, and drop the oldest; all ranks together.

    Raises:
        CheckpointError: On every rank, if the main process cannot write it.
    """
    accelerator = run.accelerator
    path = run.checkpoints / f"step-{run.step:08d}"
    gathered = gather_json({kind: state.tolist() for kind, state in checkpoint.rng_states().items()}, accelerator)
    with together(accelerator, "saving a checkpoint"):
        if accelerator.is_main_process:
            checkpoint.clear_damaged(path)
        if accelerator.is_main_process and not path.exists():  # a resumed run may be at a step that it has saved
            rng = {
                f"{rank}.{kind}": torch.tensor(state, dtype=torch.uint8)
                for rank, kinds in enumerate(cast(list[dict[str, list[int]]], gathered))
                for kind, state in kinds.items()
            }
            checkpoint.write_checkpoint(path, describe_state(run), run.bare, run.optimizer, rng)
            checkpoint.prune(run.checkpoints, run.config.checkpoint.keep)


def find_resume(config: TrainConfig, accelerator: Accelerator) -> Path | None:
    """Return the checkpoint that `resume` names, chosen by the main process for all; None to start anew.

    Raises:
        CheckpointError: If a path is named that is no whole checkpoint.
    """
    path: Path | None = None
    with together(accelerator, "finding the checkpoint"):
        if accelerator.is_main_process and config.resume is not None:
            path = choose_checkpoint(config.resume, config.run_dir)
    chosen = gather_json(None if path is None else str(path), accelerator)[0]
    return None if chosen is None else Path(cast(str, chosen))


def choose_checkpoint(resume: str, run_dir: Path) -> Path | None:
    """Return the checkpoint meant by "auto" (None where there is none yet) or by a path, verified."""
    if resume == "auto":
        found = checkpoint.find_newest(run_dir)
        logger.info("resume=auto %s", f"from {found}" if found else f"found no checkpoint below {run_dir}: a new run")
        return found
    if not Path(resume).is_dir():
        raise CheckpointError(f"resume {resume}: no such directory; wanted RUN/checkpoints/step-... or auto")
    checkpoint.read_state(Path(resume))
    return Path(resume)


def restore(run: Run, path: Path) -> None:
    """Put a run where a checkpoint left it: weights, optimizer, loss scaler and step. Call it before the wrap.

    The random states come last, by `restore_random`: building and wrapping draw from them.

    Raises:
        CheckpointError: On every rank, if the checkpoint was written under other conditions, or does not fit.
    """
    with together(run.accelerator, "resuming"):
        state, now = checkpoint.read_state(path), describe_state(run)
        checkpoint.check_resumable(path, fill_in(state, now), now)
        checkpoint.load_weights(path, run.bare, run.optimizer)
        run.step = state.step
        if run.accelerator.scaler is not None and state.scaler:
            run.accelerator.scaler.load_state_dict(state.scaler)


def restore_random(run: Run, path: Path) -> None:
    """Give each rank the random states that it saved."""
    with together(run.accelerator, "resuming"):
        checkpoint.restore_rng(checkpoint.load_rng(path, run.accelerator.process_index))
