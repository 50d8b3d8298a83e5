"""What ranks say to one another outside DDP: values as JSON, who they are, how each fared, and whether all are there.

Nothing here pickles. Every function that gathers must be called by all ranks, in the same order.
"""

import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from accelerate import Accelerator

from train.errors import WorldSizeError
from train.faults import pulse
from train.launching.launch_line import find_command, read_launch_line

JsonValue: TypeAlias = "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"

# In Accelerate's own order: torchrun and accelerate launch, then the MPI launchers.
_WORLD_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_LOCAL_WORLD_SIZES = ("LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")

_SHARED = "raised on every rank alike"


@dataclass(frozen=True)
class RankInfo:
    """Where one rank runs.

    Attributes:
        rank: Its number in the world, from 0.
        local_rank: Its number on its machine, from 0.
        device: The torch device it trains on, as "cpu" or "cuda:1".
        backend: What carries its collectives, as "gloo" or "nccl"; "none" in a world of one.
        hostname: The machine.
        pid: The process on that machine.
    """

    rank: int
    local_rank: int
    device: str
    backend: str
    hostname: str
    pid: int

    def __str__(self) -> str:
        return f"rank={self.rank} device={self.device} backend={self.backend} host={self.hostname} pid={self.pid}"


def gather_json(value: JsonValue, accelerator: Accelerator) -> list[JsonValue]:
    """Gather one JSON value from every rank, in rank order, on every rank.

    Args:
        value: What this rank has to say; it comes back as JSON gives it, so tuples come back as lists.
        accelerator: The world to gather over.

    Raises:
        TypeError: If the value is not JSON.
    """
    text = json.dumps(value).encode()  # ASCII: a name that is no text is escaped
    if accelerator.num_processes == 1:
        return [json.loads(text)]
    sent = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(accelerator.device)
    lengths = accelerator.gather(torch.tensor([len(text)], device=accelerator.device)).tolist()
    padded = torch.nn.functional.pad(sent, (0, max(lengths) - len(text)))
    rows = accelerator.gather(padded[None]).cpu()  # (world_size, longest)
    return [json.loads(bytes(row[:length].tolist())) for row, length in zip(rows, lengths, strict=True)]


def describe_ranks(accelerator: Accelerator) -> tuple[RankInfo, ...]:
    """Gather where every rank runs, in rank order."""
    mine = RankInfo(
        rank=accelerator.process_index,
        local_rank=max(accelerator.local_process_index, 0),
        device="cpu" if accelerator.device.type == "cpu" else str(accelerator.device),  # every rank's CPU is "cpu:0"
        backend=dist.get_backend() if dist.is_available() and dist.is_initialized() else "none",
        hostname=platform.node(),
        pid=os.getpid(),
    )
    return tuple(RankInfo(**row) for row in gather_json(asdict(mine), accelerator))  # type: ignore[arg-type]


@contextmanager
def together(accelerator: Accelerator, what: str) -> Iterator[None]:
    """Run a piece of work on every rank; if it fails on any, raise the same error on all.

    Without it a rank that raises leaves, and the others wait for it in their next collective. The work itself must hold
    no collective, or a rank that failed before it would leave the others waiting inside.

    Args:
        accelerator: The world.
        what: The work in a few words, for the message: "reading the data".

    Raises:
        Exception: The first failing rank's kind of error, or its nearest ancestor that is made from a message alone.
            What all ranks say alike is said once; else one line for each different message.
    """
    if accelerator.num_processes == 1:
        yield
        return
    failure: Exception | None = None
    pulse.mark(what)
    try:
        yield
    except Exception as error:  # every kind: the other ranks have to hear of it before it goes on
        failure = error
    pulse.mark(f"{what}, done here")
    mine = None if failure is None else {"kinds": _kinds(type(failure)), "message": str(failure) or repr(failure)}
    outcomes = gather_json(mine, accelerator)
    told = {rank: outcome for rank, outcome in enumerate(outcomes) if isinstance(outcome, dict)}
    if told:
        kinds = next(iter(told.values()))["kinds"]
        message = _merge({rank: outcome["message"] for rank, outcome in told.items()}, len(outcomes), what)
        shared = _rebuild(kinds, message)
        shared.add_note(_SHARED)
        raise shared from failure


def is_shared(error: BaseException) -> bool:
    """Say whether an error was raised on every rank alike, by `together`."""
    return _SHARED in getattr(error, "__notes__", ())


def find_launcher(environ: Mapping[str, str]) -> int | None:
    """Return the pid of the launcher that started this process, None if it was started by hand."""
    launched = "TORCHELASTIC_RUN_ID" in environ or read_launch_line(find_command()) is not None
    return os.getppid() if launched else None


def check_devices(environ: Mapping[str, str], *, num_gpus: int | None = None) -> None:
    """Refuse more processes than GPUs on this machine; call it before the Accelerator, which would fail inside CUDA.

    Args:
        environ: The process environment.
        num_gpus: GPUs on this machine; None asks torch. With 0 there is nothing to share out and any count is right.

    Raises:
        WorldSizeError: If this machine runs more ranks than it has GPUs.
    """
    num_gpus = torch.cuda.device_count() if num_gpus is None else num_gpus
    local_world_size = _first_int(environ, _LOCAL_WORLD_SIZES) or 1
    on_cpu = environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    if num_gpus and not on_cpu and local_world_size > num_gpus:
        raise WorldSizeError(
            f"{local_world_size} processes were asked for on a machine with {num_gpus} GPU{'s' * (num_gpus > 1)}: "
            f"launch with --num_processes {num_gpus} (torchrun: --nproc-per-node {num_gpus})"
        )


def check_world(accelerator: Accelerator, environ: Mapping[str, str], command: Sequence[str] | None = None) -> None:
    """Refuse to train when the processes that were asked for are not the processes that see each other.

    Args:
        accelerator: The world as it is.
        environ: The process environment, in which a launcher leaves the world size it was asked for.
        command: The parent's command line, in which `accelerate launch` was asked for processes; None reads it.

    Raises:
        WorldSizeError: If fewer processes see each other than the launcher was asked for.
    """
    check_devices(environ)
    found, asked = accelerator.num_processes, _first_int(environ, _WORLD_SIZES)
    if asked is not None and asked > found:
        raise WorldSizeError(
            f"the launcher started {asked} processes, but rank {environ.get('RANK', '?')} sees {found}: each would "
            "train alone. Make the Accelerator with cpu=True where there is no GPU: "
            "Accelerator(cpu=not torch.cuda.is_available()); if nothing was launched, unset WORLD_SIZE"
        )
    if asked is None:
        _check_launch_line(find_command() if command is None else command, found)


def _check_launch_line(command: Sequence[str], found: int) -> None:
    line = read_launch_line(command)
    if line is not None and line.num_processes is not None and line.num_processes > found:
        asked = line.num_processes
        raise WorldSizeError(
            f"accelerate launch was asked for {asked} processes and started {found} (with --cpu, or a config of type "
            f"MULTI_CPU or NO, it starts one). For {asked} ranks, on GPUs or without one: "
            f"accelerate launch --multi_gpu --num_processes {asked} {line.target}"
        )


def _first_int(environ: Mapping[str, str], names: Sequence[str]) -> int | None:
    return next((int(environ[name]) for name in names if environ.get(name, "").isdecimal()), None)


def _kinds(kind: type[BaseException]) -> list[str]:
    return [f"{base.__module__}:{base.__qualname__}" for base in kind.__mro__ if issubclass(base, Exception)]


def _merge(messages: Mapping[int, str], world_size: int, what: str) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, message in messages.items():
        ranks.setdefault(message, []).append(rank)
    if len(ranks) == 1:
        alone = (
            "" if len(messages) == world_size else f" (rank {', '.join(map(str, messages))} of {world_size}, {what})"
        )
        return next(iter(ranks)) + alone
    lines = [f"rank {', '.join(map(str, who))}: {message}" for message, who in ranks.items()]
    return "\n  ".join([f"{what} failed on {len(messages)} of {world_size} ranks", *lines])


def _rebuild(kinds: Sequence[str], message: str) -> Exception:
    for kind in kinds:
        module, _, name = kind.partition(":")
        found = getattr(sys.modules.get(module), name, None)
        if isinstance(found, type) and issubclass(found, Exception):
            try:
                error = found(message)
            except TypeError:  # it is made from more than a message: its parent will do
                continue
            if str(error) == message:
                return error
    return RuntimeError(message)
