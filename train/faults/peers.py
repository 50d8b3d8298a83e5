"""Which process each rank is, and whether it is still there, as far as this machine can see."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from accelerate import Accelerator

from train.ranks import RankInfo, gather_json


@dataclass(frozen=True)
class Peer:
    """A rank's process.

    Attributes:
        rank: Its number.
        hostname: Its machine, for people.
        system: The running system and process namespace that its pid belongs to: host names can be equal.
        pid: Its process there.
    """

    rank: int
    hostname: str
    system: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.hostname})"


def find_peers(accelerator: Accelerator, infos: Sequence[RankInfo]) -> tuple[Peer, ...]:
    """Return every rank's process, in rank order: as `infos` say, with its system, gathered; all ranks together."""
    systems = gather_json(find_system(), accelerator)
    return tuple(
        Peer(info.rank, info.hostname, str(system), info.pid) for info, system in zip(infos, systems, strict=True)
    )


def find_system() -> str:
    """Name the running system and the namespace of this process's pid; unlike a host name nobody else has it."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = boot.read_text().strip() if boot.is_file() else os.uname().nodename
    namespace = Path("/proc/self/ns/pid")
    return f"{name} {namespace.readlink() if namespace.is_symlink() else ''}".strip()


def is_gone(peer: Peer, system: str) -> bool:
    """Say whether a peer's process has certainly ended; of another machine's nothing is known here."""
    if peer.system != system:
        return False
    try:
        return bool(psutil.Process(peer.pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:  # it may not be looked at, so it is there
        return False
