"""Who is gone, silent or hung, judged from the ranks' signs of life. No thread, no clock: the watch brings both."""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

from train.config import WatchConfig
from train.faults.board import Beat
from train.faults.cause import Cause
from train.faults.peers import Peer, is_gone
from train.faults.pulse import Pulse

_BROKEN_S = 3.0
_IMPATIENT_S = 6.0


@dataclass
class Observer:
    """What one rank knows of the others.

    Args:
        me: This rank's process.
        peers: All ranks' processes, this one's included, in rank order.
        config: How long to wait.
    """

    me: Peer
    peers: Sequence[Peer]
    config: WatchConfig
    _beats: dict[int, Beat] = field(default_factory=dict)
    _changed: dict[int, float] = field(default_factory=dict)
    _missed: dict[int, float] = field(default_factory=dict)
    _silence_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._silence_s = self.config.silence_s

    def be_impatient(self) -> None:
        """Wait less for a rank that is silent from now on: a collective has broken off, so one has gone somewhere."""
        self._silence_s = min(self.config.silence_s, _IMPATIENT_S)

    def hear(self, beats: Sequence[Beat], now: float) -> None:
        """Take note of all ranks' latest signs of life, at `now` seconds on any steady clock."""
        for rank, beat in enumerate(beats):
            if rank not in self._beats or beat != self._beats[rank]:
                self._beats[rank], self._changed[rank] = beat, now

    def judge(self, now: float) -> Cause | None:
        """Return what is wrong by what was heard, None if nothing is."""
        return self._find_silent(now) or self._find_hung()

    def judge_board(self, seconds: float, *, broken: bool) -> Cause | None:
        """Return what is wrong with rank 0, who keeps the board.

        Args:
            seconds: Since it was read last.
            broken: Whether rank 0's end of the connection is closed, as it is when its process is gone.
        """
        if seconds < (_BROKEN_S if broken else self._silence_s) or self._beats.get(0, {}).get("left"):
            return None
        keeper = self.peers[0]
        its = [peer.rank for peer in self.peers if peer.system == keeper.system]
        alone = broken or keeper.system == self.me.system
        what = "has closed its connections" if broken else f"could not be reached for {seconds:.0f} s"
        return Cause(
            kind="silent",
            ranks=(0,) if alone else tuple(its),
            message=f"{keeper} {what}, last {self._place(0)}: "
            + ("its process is gone" if broken else "machine or network down, or the process is stopped"),
        )

    def find_gone(self, now: float, heard_at: float, *, broken: bool) -> Cause | None:
        """Return the processes of this machine that have ended without a goodbye.

        A rank that has said goodbye may be gone before that is heard here; so only what was heard later counts.

        Args:
            now: Seconds, on the clock of `hear`.
            heard_at: When the signs of life were read that `hear` was given last.
            broken: Whether nothing will be heard any more.
        """
        for peer in self._others():
            if peer.rank not in self._missed and is_gone(peer, self.me.system):
                self._missed[peer.rank] = now
        gone = [
            peer
            for peer in self._others()
            if peer.rank in self._missed and (broken or heard_at > self._missed[peer.rank])
        ]
        if not gone:
            return None
        return Cause(
            kind="gone",
            ranks=tuple(peer.rank for peer in gone),
            message=f"{', '.join(map(str, gone))} {'are' if len(gone) > 1 else 'is'} gone, last "
            f"{self._place(gone[0].rank)}: crashed, or killed (by hand, or for want of memory); the launcher tells "
            "the exit status",
        )

    def end_silent(self, cause: Cause) -> None:
        """Kill the processes of this machine that are silent: stopped ones would outlive the run, and its launcher."""
        for rank in cause.ranks if cause.kind == "silent" else ():
            peer = self.peers[rank]
            if rank != self.me.rank and peer.system == self.me.system and not is_gone(peer, self.me.system):
                with suppress(ProcessLookupError):  # it ended meanwhile
                    os.kill(peer.pid, signal.SIGKILL)

    def _find_silent(self, now: float) -> Cause | None:
        silent = [peer for peer in self._others() if now - self._since(peer, now) > self._silence_s]
        if not silent:
            return None
        seconds = max(now - self._since(peer, now) for peer in silent)
        return Cause(
            kind="silent",
            ranks=tuple(peer.rank for peer in silent),
            message=f"{', '.join(map(str, silent))} gave no sign of life for {seconds:.0f} s, last "
            f"{self._place(silent[0].rank)}: machine or network down, or the process is stopped (--watch.silence_s)",
        )

    def _find_hung(self) -> Cause | None:
        there = (self.me, *self._others())
        beats = {peer.rank: self._beats[peer.rank] for peer in there if self._beats.get(peer.rank)}
        if not beats:
            return None
        least = min(cast(int, beat["count"]) for beat in beats.values())
        behind = {rank: beat for rank, beat in beats.items() if beat["count"] == least}
        still = min(cast(float, beat["still_s"]) for beat in behind.values())
        if still <= self.config.timeout_s or any(beat["patient"] for beat in behind.values()):
            return None
        where = "; ".join(f"rank {rank} in {beat['stack']}" for rank, beat in list(behind.items())[:4])
        who = ", ".join(str(self.peers[rank]) for rank in behind)
        alone = len(behind) < len(beats)
        return Cause(
            kind="hung",
            ranks=tuple(behind),
            message=(
                f"{who} did not get on for {still:.0f} s {self._place(next(iter(behind)))}, and the other ranks wait: "
                if alone
                else f"no rank got on for {still:.0f} s, all are {self._place(next(iter(behind)))}: "
            )
            + f"{where}. If that is honest work, raise --watch.timeout_s (now {self.config.timeout_s:g})",
        )

    def _others(self) -> list[Peer]:
        """Return the other ranks that have not said goodbye."""
        return [
            peer for peer in self.peers if peer.rank != self.me.rank and not self._beats.get(peer.rank, {}).get("left")
        ]

    def _since(self, peer: Peer, now: float) -> float:
        return self._changed.setdefault(peer.rank, now)

    def _place(self, rank: int) -> str:
        return f"at {self._beats.get(rank, {}).get('place', 'the start')}"


def make_beat(pulse: Pulse, number: int, now: float, timeout_s: float, *, left: bool = False) -> Beat:
    """Put this rank's place into a sign of life; `number` makes each one differ from the last.

    A rank that has stood still for too long says where: its main thread's innermost calls.
    """
    still = now - pulse.since
    return {
        "n": number,
        "count": pulse.count,
        "place": pulse.place,
        "still_s": round(still, 1),
        "patient": pulse.patient,
        "left": left,
        "stack": describe_stack() if still > timeout_s else "",
    }


def describe_stack(depth: int = 3) -> str:
    """Name the main thread's innermost calls, outermost first, as "step.py:60 train_step > attention.py:31 attend"."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    calls = traceback.extract_stack(frame)[-depth:]
    return " > ".join(f"{call.filename.rpartition('/')[2]}:{call.lineno} {call.name}" for call in calls)
