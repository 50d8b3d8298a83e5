"""A thread on each rank that watches all of them, and ends this process when the run cannot go on.

The main thread may be inside a collective that never returns; so the thread sees, tells, marks and leaves by itself. It
waits a moment first: a main thread that has an error of its own to tell comes before it.
"""

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Collection, Sequence
from typing import NoReturn

from train.config import WatchConfig
from train.errors import Stopped
from train.faults import pulse, stop
from train.faults.board import Beat, Board
from train.faults.cause import Cause, cause_of, is_consequence
from train.faults.last_words import LastWords
from train.faults.observer import Observer, make_beat
from train.faults.peers import Peer

logger = logging.getLogger(__name__)

_PERIOD_S = 0.5
_RANKS_A_PERIOD = 64  # more ranks, fewer looks: each look of each rank reads what all have written
_LOOKS_A_SILENCE = 4  # at least
_MAIN_FIRST_S = 2.0  # the main thread, broken off by the same fault, is given so long to tell it
_STOP_S = 20.0  # a launcher kills 30 s after its SIGTERM, unless it was told otherwise by
_SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_TOLD_S = 20.0
_GOODBYE_S = 5.0
_LAST_S = 40.0  # what cannot be told or marked in this time, is not


class Watch:
    """The watch of one rank.

    Args:
        peers: All ranks' processes, in rank order.
        rank: This one.
        config: How long to wait.
        board: Where ranks meet; None in a world of one.
        words: Tells a cause and marks the run, on one rank for all.
        parent: The launcher's pid, whose death asks for a stop; None where nothing was launched.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        rank: int,
        config: WatchConfig,
        board: Board | None,
        words: LastWords,
        parent: int | None = None,
    ) -> None:
        self.rank, self.words = rank, words
        self._world_size, self._config, self._board, self._parent = len(peers), config, board, parent
        self._observer = Observer(peers[rank], peers, config)
        self._period = min(_PERIOD_S * max(1.0, len(peers) / _RANKS_A_PERIOD), config.silence_s / _LOOKS_A_SILENCE)
        self._done, self._found = threading.Event(), threading.Event()
        self._cause: Cause | None = None
        self._settled: tuple[Cause, bool] | None = None
        self._taken = threading.Lock()
        self._beats, self._left = 0, False
        self._signal: tuple[str, float] | None = None
        self._fault = ""
        self._stop_s = max(_STOP_S / 4, _STOP_S + float(os.environ.get(_SHUTDOWN, "30")) - 30)
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Start to watch."""
        if self._board is not None:
            self._board.start(self._beat, self._period)
        self._thread.start()

    def close(self) -> None:
        """Say goodbye to the other ranks, and watch no more. Rank 0, who keeps the board, leaves last."""
        self._done.set()
        self._thread.join()
        self._left = True
        if self._board is None or self._cause is not None:
            return
        others = range(self._world_size) if self.rank == 0 else (self.rank,)
        self._board.wait_until(
            lambda reading: all(reading.beats and reading.beats[rank].get("left") for rank in others), _GOODBYE_S
        )

    def settle(self, error: BaseException) -> tuple[Cause, bool]:
        """Return the first cause of an error on the main thread, and whether that is this error itself.

        A collective that broke off waits until it is known which rank is gone.
        """
        if self._settled is None:
            if not self._taken.acquire(blocking=False):
                time.sleep(3 * _TOLD_S)  # the watch is leaving, and this thread with it
            mine = cause_of(error, self.rank, self._world_size, pulse.read().place)
            if is_consequence(error):
                self._observer.be_impatient()
                self._found.wait(self._config.silence_s + 10)
            elif isinstance(error, Stopped) and not error.agreed and self._board is not None:
                self._found.wait(3 * self._period)  # a launcher sends SIGTERM because of another rank, too
            cause = self._cause or (mine if self._board is None else self._board.claim(mine))
            self._cause = cause
            self._found.set()
            self._settled = cause, (cause.kind, cause.message) == (mine.kind, mine.message)
        return self._settled

    def finish(self, cause: Cause) -> None:
        """Tell the cause if it is this rank's part to do so; else wait until it has been told.

        Where that does not come, the next rank tells it.
        """
        self._observer.end_silent(cause)
        if self._board is None:
            self.words.speak(cause)
            return
        if self._is_mine_to_tell(cause, self._board):
            self.words.speak(cause)
            self._board.set_told(set(range(self._world_size)) - set(cause.gone))
        else:
            self.words.echo(cause)
            self._board.confirm_told()

    def _is_mine_to_tell(self, cause: Cause, board: Board) -> bool:
        """Say whether this rank is the one to tell; where another is, wait until it has, or evidently cannot."""
        mute = set(cause.gone)
        for _ in range(2):
            reading = board.read()
            if reading.told:
                return False
            if reading.broken:
                mute.add(0)
            speaker = speaker_of(mute, self._world_size)
            if self.rank == speaker or reading.broken:
                return self.rank == speaker
            board.wait_until(lambda reading: reading.told, _TOLD_S)
            mute.add(speaker)
        return False

    def _run(self) -> None:
        while not self._done.wait(self._period):
            cause = self._look_safely()
            if cause is None:
                continue
            if not self._found.is_set():
                self._cause = cause
                self._found.set()
            if self._done.wait(_MAIN_FIRST_S):
                return
            if self._taken.acquire(blocking=False):
                self._leave(cause)

    def _look_safely(self) -> Cause | None:
        """Look; a fault of the watch itself is told, once, and does not end it: it may pass, and the run is sound."""
        try:
            return self._look()
        except Exception as error:
            if self._fault != (fault := f"{type(error).__name__}: {error}"):
                logger.exception("the watch could not look at the ranks, and tries again: %s", fault)
            self._fault = fault
            return None

    def _look(self) -> Cause | None:
        """Return why the run cannot go on, None if it can."""
        now = pulse.now()
        if self._parent is not None and os.getppid() != self._parent:
            stop.request("the launcher is gone")
        late = self._look_at_signals(now)
        if self._board is None:
            self._observer.hear([self._beat()], now)
            return self._cause or late or self._observer.judge(now)
        reading = self._board.read()
        self._observer.hear(reading.beats, now)
        if reading.cause is not None or self._cause is not None:
            return reading.cause or self._cause
        judged = (
            late
            or self._observer.find_gone(now, reading.at, broken=reading.broken)
            or self._observer.judge_board(now - reading.at, broken=reading.broken)
        )
        if judged is None and not reading.broken:
            judged = self._observer.judge(now)
        return None if judged is None else self._board.claim(judged)

    def _look_at_signals(self, now: float) -> Cause | None:
        """Notice a signal that the main thread cannot see, and leave for it if no step ends in time.

        Without a launcher, who would soon kill all ranks, it may end as late as it likes, as long as the work gets on.
        """
        if (name := stop.unheard()) is not None and self._signal is None:
            stop.request(name)
            self._signal = name, now
        if self._signal is None or now - self._signal[1] < self._stop_s or stop.granted():
            return None
        if self._parent is None and pulse.read().since > self._signal[1]:
            return None
        message = (
            f"{self._signal[0]}, and no step ended in {self._stop_s:g} s: nothing was saved after the last checkpoint"
        )
        return Cause(kind="stopped", ranks=(self.rank,), message=message)

    def _beat(self) -> Beat:
        self._beats += 1
        return make_beat(pulse.read(), self._beats, pulse.now(), self._config.timeout_s, left=self._left)

    def _leave(self, cause: Cause) -> NoReturn:
        deadline = threading.Timer(_LAST_S, os._exit, (cause.status or 1,))
        deadline.daemon = True
        deadline.start()  # a full pipe, or a lock that the main thread holds, must not keep this process
        try:
            self.finish(cause)
            sys.stdout.flush()
            sys.stderr.flush()
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(cause.status or 1)


def speaker_of(mute: Collection[int], world_size: int) -> int:
    """Return the rank that tells a cause and marks the run: the main process, or the lowest that can."""
    return next((rank for rank in range(world_size) if rank not in mute), 0)
