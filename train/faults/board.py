"""A board that all ranks write on and read outside collectives: signs of life, and the first cause.

It is a TCPStore of its own that rank 0 keeps, so it outlives the launcher, and no collective that hangs can block it.
"""

import json
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import TypeAlias, cast

import torch.distributed as dist
from accelerate import Accelerator
from pydantic import JsonValue
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but for the type stubs

from train.errors import WorldSizeError
from train.faults.cause import Cause
from train.ranks import gather_json, together

Beat: TypeAlias = dict[str, JsonValue]

_PATIENCE = timedelta(seconds=5)  # of one question; also that of a rank whose machine has gone
_CAUSE, _TOLD = "cause", "told"


class BoardError(Exception):
    """Rank 0, who keeps the board, does not answer."""


class Board:
    """The board as one rank sees it; `open_board` makes it on all ranks together."""

    def __init__(self, store: TCPStore, rank: int, world_size: int) -> None:
        self._store, self._rank = store, rank
        self._keys = [_CAUSE, _TOLD, *(f"beat/{other}" for other in range(world_size))]

    def exchange(self, beat: Beat) -> tuple[Cause | None, bool, list[Beat]]:
        """Leave this rank's sign of life; return the first cause if there is one, whether it was told, and all beats.

        Raises:
            BoardError: If rank 0 does not answer.
        """
        try:
            self._store.set(f"beat/{self._rank}", json.dumps(beat))
            cause, told, *beats = (value.decode() for value in self._store.multi_get(self._keys))
        except (dist.DistError, RuntimeError, OSError) as error:
            raise BoardError(str(error)) from error
        return (
            Cause.model_validate_json(cause) if cause else None,
            bool(told),
            [cast(Beat, json.loads(text)) if text else {} for text in beats],
        )

    def claim(self, cause: Cause) -> Cause:
        """Put up a cause unless another was there first; return the first. Where rank 0 is gone, it is this one."""
        try:
            return Cause.model_validate_json(self._store.compare_set(_CAUSE, "", cause.model_dump_json()))
        except (dist.DistError, RuntimeError, OSError):
            return cause

    def set_told(self) -> None:
        """Say that the cause has been told and marked: the others may leave. In vain where rank 0 is gone."""
        try:
            self._store.set(_TOLD, "yes")
        except (dist.DistError, RuntimeError, OSError):
            return

    def _write_first(self) -> None:
        for key in self._keys:
            self._store.set(key, "")


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
            store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_PATIENCE)
            board, port = Board(store, rank, world_size), store.port
            board._write_first()
    port = cast(Sequence[int], gather_json(port, accelerator))[0]
    with together(accelerator, "reaching rank 0's board"):
        if board is None:
            try:
                board = Board(TCPStore(host, port, timeout=_PATIENCE), rank, world_size)
            except (dist.DistError, RuntimeError) as error:
                raise WorldSizeError(
                    f"rank {rank} cannot reach rank 0 at {host}:{port} ({' '.join(str(error).split())[:200]}); ranks "
                    "need all ports between the machines, not the launcher's alone"
                ) from error
    return board
