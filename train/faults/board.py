"""A board that all ranks write on and read outside collectives: signs of life, and the first cause.

It is a TCPStore of its own that rank 0 keeps, so it outlives the launcher, and no collective that hangs can block it.
Its questions have no timeout where the other end stands still, so a thread of its own asks them; nobody waits for it.
"""

import json
import os
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeAlias, cast

import torch.distributed as dist
from accelerate import Accelerator
from pydantic import JsonValue
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but for the type stubs

from train.errors import WorldSizeError
from train.faults import pulse
from train.faults.cause import Cause
from train.ranks import gather_json, together

Beat: TypeAlias = dict[str, JsonValue]

_CONNECT = timedelta(seconds=30)
_CLAIM_S = 3.0
_CAUSE, _TOLD = "cause", "told"


@dataclass(frozen=True)
class Reading:
    """What stood on the board.

    Attributes:
        at: Since when it holds, on the clock of `pulse.now`.
        cause: The first cause, None if there is none.
        told: Whether it was told and marked, so that all may leave.
        beats: The last sign of life of every rank, empty before its first.
        broken: Whether the connection has broken since: rank 0's process is gone.
    """

    at: float
    cause: Cause | None = None
    told: bool = False
    beats: tuple[Beat, ...] = ()
    broken: bool = False


class Board:
    """The board as one rank sees it; `open_board` makes it on all ranks together.

    Args:
        store: The connection.
        rank: This rank.
        world_size: Ranks in all.
    """

    def __init__(self, store: TCPStore, rank: int, world_size: int) -> None:
        self._store, self._rank = store, rank
        self._keys = [_CAUSE, _TOLD, *(f"beat/{other}" for other in range(world_size))]
        self._claim: Cause | None = None
        self._set_told = False
        self._reading = Reading(pulse.now())
        self._wake, self._read = threading.Event(), threading.Condition()

    def start(self, beat: Callable[[], Beat], period_s: float) -> None:
        """Leave a sign of life and read all others' every `period_s` seconds, for as long as the process lives."""

        def go_round() -> None:
            while not self._reading.broken:
                self._exchange(beat())
                self._wake.wait(period_s)
                self._wake.clear()

        threading.Thread(target=go_round, name="board", daemon=True).start()

    def read(self) -> Reading:
        """Return what stood there last."""
        return self._reading

    def claim(self, cause: Cause) -> Cause:
        """Put up a cause unless another was there first; return the first. Where rank 0 is gone, it is this one."""
        self._claim = cause
        self._wake.set()
        with self._read:
            self._read.wait_for(lambda: self._reading.cause is not None or self._reading.broken, _CLAIM_S)
        return self._reading.cause or cause

    def set_told(self, ranks: Collection[int]) -> None:
        """Say that the cause has been told and marked, and wait a moment until `ranks` have read it."""
        self._set_told = True
        self.wait_until(lambda reading: reading.told and self._have_read(reading, ranks), _CLAIM_S)

    def confirm_told(self) -> None:
        """Wait a moment until it stands on the board that this rank has read that the cause was told."""
        self.wait_until(lambda reading: self._have_read(reading, (self._rank,)), _CLAIM_S)

    def wait_until(self, holds: Callable[[Reading], bool], timeout_s: float) -> None:
        """Wait until something stands on the board, or the connection breaks, or time is up."""
        self._wake.set()
        with self._read:
            self._read.wait_for(lambda: holds(self._reading) or self._reading.broken, timeout_s)

    def write_first(self) -> None:
        """Make all keys: to ask for one that is not there would wait for it."""
        for key in self._keys:
            self._store.set(key, "")

    def _have_read(self, reading: Reading, ranks: Collection[int]) -> bool:
        return bool(reading.beats) and all(reading.beats[rank].get("told") for rank in ranks)

    def _exchange(self, beat: Beat) -> None:
        at, beat = pulse.now(), {**beat, "told": self._reading.told}
        try:
            self._store.set(f"beat/{self._rank}", json.dumps(beat))
            if self._claim is not None:
                self._store.compare_set(_CAUSE, "", self._claim.model_dump_json())
            if self._set_told:
                self._store.set(_TOLD, "yes")
            cause, told, *beats = (value.decode() for value in self._store.multi_get(self._keys))
            reading = Reading(
                at,
                Cause.model_validate_json(cause) if cause else None,
                bool(told),
                tuple(cast(Beat, json.loads(text)) if text else {} for text in beats),
            )
        except (dist.DistError, RuntimeError, OSError):
            reading = replace(self._reading, broken=True)
        with self._read:
            self._reading = reading
            self._read.notify_all()


def open_board(accelerator: Accelerator) -> Board | None:
    """Open the board on all ranks together; None in a world of one.

    Raises:
        WorldSizeError: If a rank cannot reach rank 0's; on every rank.
    """
    rank, world_size = accelerator.process_index, accelerator.num_processes
    if world_size == 1:
        return None
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    board: Board | None = None
    port = 0
    with together(accelerator, "opening rank 0's board"):
        if rank == 0:
            store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_CONNECT)
            board, port = Board(store, rank, world_size), store.port
            board.write_first()
    port = cast(Sequence[int], gather_json(port, accelerator))[0]
    with together(accelerator, "reaching rank 0's board"):
        if board is None:
            try:
                board = Board(TCPStore(host, port, timeout=_CONNECT), rank, world_size)
            except (dist.DistError, RuntimeError) as error:
                raise WorldSizeError(
                    f"rank {rank} cannot reach rank 0 at {host}:{port} ({' '.join(str(error).split())[:200]}); ranks "
                    "need all ports between the machines, not the launcher's alone"
                ) from error
    return board
