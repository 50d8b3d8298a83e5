"""Checkpoints: all that a run needs to go on, written whole or not at all. safetensors and JSON, no pickle.

A checkpoint is a directory RUN/checkpoints/step-00000450 with `model.safetensors`, `optimizer.safetensors` (tensors
named after their parameter), `rng.safetensors` (each rank's random state) and `state.json`, which lists size and hash
of the others.
"""

import json
import logging
import shutil
from pathlib import Path
from typing import Literal, cast

import torch
import xxhash
from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from train.errors import CheckpointError
from train.latest import is_latest
from zoo.files.durable import new_directory
from zoo.files.ties import find_ties

logger = logging.getLogger(__name__)

STATE, MODEL, OPTIMIZER, RNG = "state.json", "model.safetensors", "optimizer.safetensors", "rng.safetensors"
_AS_IT_BEGAN = "a resumed run goes on as it began; set it back, or start anew without --resume"
_FREE = (
    "output_dir",
    "resume",
    "log.",
    "tracking.",
    "publish.",
    "checkpoint.",
    "evaluate.",
    "watch.",
    "data.num_workers",
)


class FileRecord(BaseModel):
    """Size in bytes and xxh3_128 of a file, as it was written."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    bytes: int
    xxh3_128: str


class CheckpointState(BaseModel):
    """What a checkpoint says of itself."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
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
    files: dict[str, FileRecord] = {}


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
            text = state.model_copy(update={"files": records}).model_dump_json(indent=1)
            (aside / STATE).write_text(text, encoding="utf-8")
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


def load_weights(path: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Load weights and optimizer state into a bare model and its optimizer, in place, before they are wrapped.

    Raises:
        CheckpointError: If names or shapes do not fit the model.
    """
    tensors = load_file(path / MODEL)
    tensors |= {name: tensors[kept] for name, kept in find_ties(model.state_dict()).items() if kept in tensors}
    try:
        model.load_state_dict(tensors, strict=True)
    except RuntimeError as error:
        raise CheckpointError(f"{path / MODEL}: does not fit the model: {' '.join(str(error).split())}") from error
    saved = load_file(path / OPTIMIZER)
    parameters = dict(model.named_parameters())
    for key, tensor in saved.items():
        name, _, slot = key.rpartition("/")
        if name not in parameters:
            raise CheckpointError(f"{path / OPTIMIZER}: {name} is no parameter of the model")
        optimizer.state[parameters[name]][slot] = tensor


def load_rng(path: Path, rank: int) -> dict[str, Tensor]:
    """Return this rank's random states by kind, uint8.

    Raises:
        CheckpointError: If this rank wrote none.
    """
    prefix = f"{rank}."
    found = {key.removeprefix(prefix): t for key, t in load_file(path / RNG).items() if key.startswith(prefix)}
    if not found:
        raise CheckpointError(f"{path / RNG}: holds no random state of rank {rank}")
    return found


def find_newest(folder: Path) -> Path | None:
    """Return the newest whole checkpoint below FOLDER/RUN/checkpoints; what is not whole is skipped with a warning."""
    runs = folder.glob("*/checkpoints/step-*")
    there = [path for path in runs if not is_latest(path.parent.parent)]  # a link to one of the others
    found = sorted(there, key=lambda path: (path.stat().st_mtime_ns, path.name))
    for path in reversed(found):
        try:
            read_state(path)
        except CheckpointError as error:
            logger.warning("skipping a checkpoint that is not whole: %s", error)
        else:
            return path
    return None


def clear_damaged(path: Path) -> None:
    """Remove what stands at `path`, with a warning, if it is no whole checkpoint: its step can be saved again."""
    if not path.exists():
        return
    try:
        read_state(path)
    except CheckpointError as error:
        logger.warning("replacing a checkpoint that is not whole: %s", error)
        shutil.rmtree(path)


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints of one run."""
    for path in sorted(folder.glob("step-*"))[:-keep]:
        shutil.rmtree(path)


def check_resumable(path: Path, state: CheckpointState, now: CheckpointState) -> None:
    """Refuse to go on under other conditions than the checkpoint was written under.

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
    for what, then, today in (
        ("ranks", state.world_size, now.world_size),
        ("training images", state.train_fingerprint, now.train_fingerprint),
        ("steps an epoch", state.steps_per_epoch, now.steps_per_epoch),
    ):
        if then != today:
            raise CheckpointError(f"{path}: {what} were {then} and are {today}: {_AS_IT_BEGAN}")
    differing = [
        f"{key} was {state.config.get(key)!r} and is {now.config.get(key)!r}"
        for key in sorted(state.config.keys() | now.config.keys())
        if state.config.get(key) != now.config.get(key) and not key.startswith(_FREE)
    ]
    if differing:
        raise CheckpointError(f"{path}: {'; '.join(differing)}: {_AS_IT_BEGAN}")


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state as "parameter's name/slot" -> tensor."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{names[id(parameter)]}/{slot}": cast(Tensor, value)
        for parameter, slots in optimizer.state.items()
        for slot, value in slots.items()
    }


def rng_states() -> dict[str, Tensor]:
    """Return this process's torch random states by kind, uint8: augmentation has seeds of its own."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_rng(states: dict[str, Tensor]) -> None:
    """Set this process's torch random states."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


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


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
