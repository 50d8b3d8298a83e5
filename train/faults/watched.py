"""Run a piece of work under the watch: whatever ends it, on whichever rank, is told once and ends all ranks."""

import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from accelerate import Accelerator

from train.config import TrainConfig
from train.errors import RunEnded
from train.faults import stop
from train.faults.board import open_board
from train.faults.cause import TOLD
from train.faults.last_words import LastWords, tell
from train.faults.peers import find_peers
from train.faults.watch import Watch
from train.launching.machines import say_where
from train.ranks import RankInfo, find_launcher, is_shared


@contextmanager
def watched(config: TrainConfig, accelerator: Accelerator, infos: Sequence[RankInfo]) -> Iterator[Watch]:
    """Watch all ranks while the block runs; every rank enters it.

    Raises:
        BaseException: What the block raised, if that is the first cause; it has been told.
        RunEnded: If what it raised only followed from what another rank did.
    """
    rank = accelerator.process_index
    peers = find_peers(accelerator, infos)
    words = LastWords(
        config.tracking,
        same_machine=peers[rank].system == peers[0].system,
        where=say_where(infos),
        first_here=rank > 0 and infos[rank].local_rank == 0,
    )
    watch = Watch(peers, rank, config.watch, open_board(accelerator), words, find_launcher(os.environ))
    watch.start()
    try:
        yield watch
    except BaseException as error:
        stop.ignore()  # a launcher sends SIGTERM to the ranks that are left, while they say why
        cause, mine = watch.settle(error)
        if mine and cause.status == 1 and cause.kind == "raised" and (error.__cause__ or not is_shared(error)):
            tell("".join(traceback.format_exception(error)).rstrip())
        watch.finish(cause)
        watch.close()
        if not mine:
            ended = RunEnded(cause.message, status=cause.status, killed=cause.kind == "stopped")
            ended.add_note(TOLD)
            raise ended from error
        error.add_note(TOLD)
        raise
    else:
        watch.close()
