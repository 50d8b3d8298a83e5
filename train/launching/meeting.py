"""The ranks' first meeting, before they can speak by collectives: it ends in all ranks there, or in one clear line.

Between the launchers' own meeting and the group of ranks lies all that can differ between machines: a recipe or a
package that only one has, too few GPUs, another launch line. Without this the ranks of the sound machine would wait
half an hour for those that have left. It speaks over the store that the first machine's launcher keeps for its ranks.
"""

import json
import logging
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public, but for the stubs

from train.errors import RunEnded, WorldSizeError, exit_status
from train.launching.launch_line import find_command, read_launch_line

logger = logging.getLogger(__name__)

_PERIOD_S = 0.1
_SAY_S = 20.0  # a wait of so long is told of
_LINGER_S = 10.0  # for the others to hear why this rank will not come
_ANSWER = timedelta(seconds=30)  # of the launcher's store


@dataclass
class Patience:
    """How long to wait for the ranks that are not there yet, in seconds; the block sets it once it knows better."""

    timeout_s: float = 600.0


@dataclass(frozen=True)
class Arrival:
    """One rank at the meeting.

    Attributes:
        rank: Its number in the world.
        machine: The number of its machine.
        hostname: That machine's name; two may have the same.
        asked: Ranks of the whole world that its launcher was asked for; None where that is not known.
    """

    rank: int
    machine: int
    hostname: str
    asked: int | None

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.hostname}"


@contextmanager
def meeting(environ: Mapping[str, str], command: Sequence[str] | None = None) -> Iterator[Patience]:
    """Do on every rank what comes before the group of ranks is made, then wait until all ranks have done it.

    Where nothing was launched, or by a launcher that keeps no store, the block is all there is.

    Args:
        environ: The process environment, as a launcher left it.
        command: The launcher's command line; None reads it.

    Raises:
        WorldSizeError: If a rank does not come in time, the launcher that keeps the store has gone, or the launchers
            were asked for another number of ranks than there is; the machine is named.
        RunEnded: If the block failed on another rank; the message names the rank and its machine.
    """
    patience = Patience()
    world_size = int(environ.get("WORLD_SIZE", "1"))
    if world_size == 1 or environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        yield patience
        return
    line = read_launch_line(find_command() if command is None else command)
    asked = None if line is None else line.num_processes
    mine = Arrival(int(environ["RANK"]), int(environ.get("GROUP_RANK", "0")), socket.gethostname(), asked)
    with _explained(mine, environ):
        place = _open_store(environ)
    try:
        yield patience
    except Exception as error:
        _refuse(place, mine, error, world_size)
        raise
    with _explained(mine, environ):
        arrivals = _come(place, mine, world_size, patience)
    check_asked(arrivals)


def check_asked(arrivals: Sequence[Arrival]) -> None:
    """Refuse a world of another size than its launchers were asked for.

    Args:
        arrivals: All ranks.

    Raises:
        WorldSizeError: Names what each machine was asked for.
    """
    world_size = len(arrivals)
    asked = {arrival.machine: arrival for arrival in reversed(arrivals) if arrival.asked is not None}
    counts = {arrival.asked for arrival in asked.values()}
    if counts <= {world_size}:
        return
    if len(counts) > 1:
        told = ", ".join(f"{one.asked} on {one.hostname} (machine {machine})" for machine, one in sorted(asked.items()))
        raise WorldSizeError(
            f"the machines were asked for different numbers of processes: {told}; --num_processes counts the ranks of "
            "all machines together, so it is the same on each"
        )
    (count,), machines = counts, len({arrival.machine for arrival in arrivals})
    raise WorldSizeError(
        f"accelerate launch was asked for {count} processes and started {world_size}: each of {machines} machines gets "
        f"the same number; launch with --num_processes {world_size} or {world_size + machines}"
    )


def _open_store(environ: Mapping[str, str]) -> Store:
    address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=_ANSWER)
    return PrefixStore(f"meeting/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _come(place: Store, mine: Arrival, world_size: int, patience: Patience) -> list[Arrival]:
    """Say that this rank is there, and return all ranks once they are."""
    place.set(f"rank/{mine.rank}", json.dumps(asdict(mine)))
    place.add("came", 1)
    start, said = time.monotonic(), False
    while place.add("came", 0) < world_size:
        if place.check(["refusal"]):
            refusal = json.loads(place.get("refusal"))
            place.add("heard", 1)
            raise RunEnded(refusal["message"], status=refusal["status"])
        waited = time.monotonic() - start
        if waited > (patience.timeout_s if said else min(_SAY_S, patience.timeout_s)):
            missing = [str(rank) for rank in range(world_size) if not place.check([f"rank/{rank}"])]
            if waited > patience.timeout_s:
                raise WorldSizeError(
                    f"{mine} waited {patience.timeout_s:g} s for rank {', '.join(missing)} of {world_size}: what the "
                    "launcher there printed says why it has not come"
                )
            logger.info("waiting for rank %s of %d, %g s at most", ", ".join(missing), world_size, patience.timeout_s)
            said = True
        time.sleep(_PERIOD_S)
    rows = place.multi_get([f"rank/{rank}" for rank in range(world_size)])
    return [Arrival(**json.loads(row)) for row in rows]


def _refuse(place: Store, mine: Arrival, error: Exception, world_size: int) -> None:
    """Say why this rank will not come, and stay until the others have heard: its launcher may keep the store."""
    refusal = {"message": f"{mine}: {str(error) or repr(error)}", "status": exit_status(error)}
    try:
        place.set("refusal", json.dumps(refusal))
        heard = place.add("heard", 1)
        deadline = time.monotonic() + _LINGER_S
        while heard < world_size and time.monotonic() < deadline:
            time.sleep(_PERIOD_S)
            heard = place.add("heard", 0)
    except (dist.DistError, RuntimeError) as lost:  # the other launcher has gone before: this error is the one to tell
        logger.debug("the other ranks were not told: %s", lost)


@contextmanager
def _explained(mine: Arrival, environ: Mapping[str, str]) -> Iterator[None]:
    """Turn the store's errors into one line that names whose output says more."""
    try:
        yield
    except dist.DistError as error:
        raise WorldSizeError(
            f"{mine}: the launcher at {environ['MASTER_ADDR']}:{environ['MASTER_PORT']}, machine 0, has gone before "
            f"all ranks had come; what it printed says why ({' '.join(str(error).split())[:200]})"
        ) from error
