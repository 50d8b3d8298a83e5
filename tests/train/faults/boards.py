"""Boards for tests: of ranks that are all this process, and one that another process keeps, which can be killed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed import TCPStore

from train.faults.board import Beat, Board

KEEP = """
import sys
from torch.distributed import TCPStore
from train.faults.board import Board
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
board = Board(store, 0, int(sys.argv[1]))
board.write_first()
board.start(lambda: {"place": "kept"}, 0.05)
print(store.port, flush=True)
sys.stdin.read()
"""


class Closed:
    """A store that is no longer there."""

    def set(self, *_: str) -> None:
        raise OSError("closed by the test")

    multi_get = compare_set = set


@contextmanager
def boards_of(world_size: int) -> Iterator[list[Board]]:
    """Give the board as each of so many ranks sees it; start them as you like, they end with the block."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [server, *(TCPStore("127.0.0.1", server.port) for _ in range(1, world_size))]
    boards = [Board(store, rank, world_size) for rank, store in enumerate(stores)]
    boards[0].write_first()
    try:
        yield boards
    finally:
        for board in boards:
            board._store = Closed()
            if board.read().beats:
                board.wait_until(lambda reading: reading.broken, 10)


def start_all(boards: list[Board], period_s: float = 0.02) -> None:
    """Let each rank leave signs of life that say its number."""
    for rank, board in enumerate(boards):
        board.start(lambda rank=rank: Beat(place=f"rank {rank}"), period_s)


@contextmanager
def board_kept_by_another(world_size: int) -> Iterator["tuple[subprocess.Popen[str], Board]"]:
    """Give rank 0's process and the board as rank 1 sees it, started."""
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", KEEP, str(world_size)]
    with subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            port = int(process.stdout.readline())
            board = Board(TCPStore("127.0.0.1", port), 1, world_size)
            board.start(lambda: Beat(place="rank 1"), 0.02)
            board.wait_until(lambda reading: len(reading.beats) == world_size and bool(reading.beats[0]), 10)
            yield process, board
        finally:
            process.kill()
    board.wait_until(lambda reading: reading.broken, 10)
