"""Checkpoints: all that a run needs to go on, written whole or not at all. safetensors and JSON, no pickle.

A checkpoint is a directory RUN/checkpoints/step-00000450 with `model.safetensors`, `optimizer.safetensors` (tensors
named after their parameter), `rng.safetensors` (each rank's random states) and `state.json`, which lists size and hash
of the others. What a killed process leaves is hidden, and cleared before the next is written.
"""

import json
import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import xxhash
from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from train.errors import CheckpointError
from train.position import Origin
from train.saving.latest import is_latest
from zoo.files.durable import clear_partial, new_directory, remove_directory
from zoo.files.ties import find_ties

logger = logging.getLogger(__name__)

STATE, MODEL, OPTIMIZER, RNG = "state.json", "model.safetensors", "optimizer.safetensors", "rng.safetensors"


class FileRecord(BaseModel):
    """Size in bytes and xxh3_128 of a file, as it was written."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    bytes: int
    xxh3_128: str


class CheckpointState(BaseModel):
    """What a checkpoint says of itself."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, ser_json_inf_nan="constants")
    format_version: Literal[1] = 1
    run_id: str
    """The MLflow run that a resumed process goes on with."""
    step: int
    """Optimizer steps done."""
    steps_per_epoch: int
    world_size: int
    """Ranks that wrote it."""
    config: dict[str, JsonValue]
    """The run's resolved config, by dotted name."""
    class_names: tuple[str, ...]
    train_fingerprint: str
    scaler: dict[str, float] = {}
    """State of the fp16 loss scaler; empty without one."""
    origin: Origin = Origin()
    """Where the global batch size of these ranks began."""
    losses: tuple[tuple[float, ...], ...] = ()
    """Of each rank, the losses of the steps since the last record."""
    pending: tuple[tuple[dict[str, float], int], ...] = ()
    """Metrics, and their step, that the tracking store has not taken yet."""
    saved_at: float = 0.0
    """When it was written, in seconds since 1970; 0 in older checkpoints."""
    files: dict[str, FileRecord] = {}


@dataclass(frozen=True)
class Resume:
    """A whole checkpoint to go on from, the same on every rank.

    Attributes:
        path: Where it lies; only the main process needs to see it.
        state: What it says of itself, as the main process has read it.
    """

    path: Path
    state: CheckpointState


def write_checkpoint(
    path: Path, state: CheckpointState, model: nn.Module, optimizer: Optimizer, rng: dict[str, Tensor]
) -> None:
    """Write a checkpoint at `path`; a crash meanwhile leaves nothing there.

    Args:
        path: The directory to be.
        state: What it says of itself; `files` is filled in here.
        model: The bare model.
        optimizer: Its optimizer.
        rng: Random states by "rank.kind", uint8.

    Raises:
        CheckpointError: If the disk refuses; the checkpoints already there are untouched.
    """
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    ties = find_ties(weights)
    kept = {name: tensor for name, tensor in weights.items() if name not in ties}
    try:
        with new_directory(path) as aside:
            for name, tensors in ((MODEL, kept), (OPTIMIZER, optimizer_tensors(model, optimizer)), (RNG, rng)):
                told = {"ties": json.dumps(ties)} if name == MODEL else None  # for whoever starts from these weights
                save_file({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, aside / name, told)
            records = {name: record_file(aside / name) for name in (MODEL, OPTIMIZER, RNG)}
            said = state.model_copy(update={"files": records, "saved_at": time.time()}).model_dump_json(indent=1)
            (aside / STATE).write_text(said, encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path}: cannot be written ({error}); the checkpoints before it are untouched"
        ) from error


def read_state(path: Path) -> CheckpointState:
    """Read and verify the checkpoint at `path`: every file there, of the size and hash it was written with.

    Raises:
        CheckpointError: If it is not whole; the message names the file.
    """
    try:
        state = CheckpointState.model_validate_json((path / STATE).read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: no whole checkpoint, {STATE} cannot be read ({error.strerror})") from error
    except ValidationError as error:
        raise CheckpointError(f"{path / STATE}: not a checkpoint's state: {_first_of(error)}") from error
    for name in (MODEL, OPTIMIZER, RNG):
        if name not in state.files or not (path / name).is_file():
            raise CheckpointError(f"{path / name}: missing")
        if record_file(path / name) != state.files[name]:
            raise CheckpointError(f"{path / name}: damaged, it is not the file that was written")
    return state


def find_whole(folder: Path) -> Resume | None:
    """Return the newest whole checkpoint below FOLDER/RUN/checkpoints; what is not whole is skipped with a warning."""
    for path in reversed(list_checkpoints(folder)):
        try:
            return Resume(path, read_state(path))
        except CheckpointError as error:
            logger.warning("skipping a checkpoint that is not whole: %s", error)
    return None


def list_checkpoints(folder: Path) -> list[Path]:
    """Return all that is named as a checkpoint below FOLDER/RUN/checkpoints, whole or not, the oldest first."""
    runs = folder.glob("*/checkpoints/step-*")
    return _by_age([path for path in runs if not is_latest(path.parent.parent)])  # a link to one of the others


def find_newest(folder: Path) -> Path | None:
    """Return where `find_whole` finds one."""
    found = find_whole(folder)
    return None if found is None else found.path


def prune(newest: Path, keep: int) -> None:
    """Remove the oldest checkpoints beside `newest`, which was just written, so that `keep` are left with it.

    One that cannot be removed stays, with a warning: the training does not depend on it.
    """
    others = _by_age([path for path in newest.parent.glob("step-*") if path != newest])
    for path in others[: max(0, len(others) - keep + 1)]:
        try:
            remove_directory(path)
        except OSError as error:
            logger.warning("an old checkpoint cannot be removed: %s", error)


def clear_litter(run_folder: Path) -> None:
    """Remove what killed processes have left of checkpoints and of a bundle; only for who holds the run."""
    for folder in (run_folder, run_folder / "checkpoints"):
        try:
            clear_partial(folder)
        except OSError as error:
            logger.warning("what a killed process has left cannot be removed: %s", error)


def _by_age(paths: list[Path]) -> list[Path]:
    """Return checkpoints from the oldest to the newest, by when they were written, without those that have gone."""
    ages = []
    for path in paths:
        with suppress(FileNotFoundError):  # another run of the name has removed its oldest
            ages.append((_find_age(path), path.name, path))
    return [path for *_, path in sorted(ages)]


def _find_age(path: Path) -> float:
    """Return when a checkpoint was written, by its own word: a copy of the folder has times of its own."""
    changed_at = path.stat().st_mtime
    try:
        return float(json.loads((path / STATE).read_bytes())["saved_at"]) or changed_at
    except (OSError, ValueError, KeyError, TypeError):  # an older one, or not whole, which shows when it is read
        return changed_at


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state as "parameter's name/slot" -> tensor."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{names[id(parameter)]}/{slot}": cast(Tensor, value)
        for parameter, slots in optimizer.state.items()
        for slot, value in slots.items()
    }


def record_file(path: Path) -> FileRecord:
    """Return a file's size and hash."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return FileRecord(bytes=path.stat().st_size, xxh3_128=digest.hexdigest())


def _first_of(error: ValidationError) -> str:
    """Phrase what is wrong with a state: another format first, which explains the rest."""
    found = error.errors(include_url=False)
    first = next((one for one in found if one["loc"] == ("format_version",)), found[0])
    where, got = ".".join(map(str, first["loc"])), "" if first["type"] == "missing" else f", got {first['input']!r:.80}"
    return f"{where}: {first['msg']}{got}" if where else first["msg"]
