"""Watches for tests: of ranks that are all this process, and that keep what they would tell."""

import os
import time
from collections.abc import Callable

from train.config import WatchConfig
from train.faults.board import Board
from train.faults.cause import Cause
from train.faults.peers import Peer, find_system
from train.faults.watch import Watch

PATIENT = WatchConfig(timeout_s=600, silence_s=20)


class Words:
    """Keeps what would be told."""

    def __init__(self) -> None:
        self.told: list[Cause] = []

    def speak(self, cause: Cause) -> None:
        self.told.append(cause)

    def echo(self, cause: Cause) -> None:
        """Nothing: there is one machine."""


def make_watch(
    rank: int = 0, boards: list[Board] | None = None, config: WatchConfig = PATIENT, parent: int | None = None
) -> Watch:
    """Make the watch of one rank of this process."""
    ranks = range(len(boards) if boards else 1)
    peers = [Peer(number, "here", find_system(), os.getpid()) for number in ranks]
    return Watch(peers, rank, config, boards[rank] if boards else None, Words(), parent)


def until(holds: Callable[[], object], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
