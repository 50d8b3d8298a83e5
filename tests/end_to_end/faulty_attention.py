"""A plugin whose attention misbehaves once, as the environment says: FAULT=KIND:RANK, in the fifth training forward.

The moment is noted in the file `fault`, in seconds on the clock that all processes of a machine share.
"""

import ctypes
import os
import signal
import time
from pathlib import Path

import psutil

import zoo

_CALL = 5
_MOMENT_S = 1.2  # in which the others hear of this rank's place
_SLOW_S = 0.2  # a step, from then on: a signal takes its way through the launcher
_SIGNALS = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "stop": signal.SIGSTOP}
_TO_LAUNCHER = {
    "launcher-term": signal.SIGTERM,
    "launcher-int": signal.SIGINT,
    "launcher-hup": signal.SIGHUP,
    "launcher-kill": signal.SIGKILL,
}


@zoo.register_attention("faulty")
class FaultyAttention(zoo.Attention):
    """timm's own attention, until it fails."""

    projection = "linear"
    calls = 0

    def attend(self, q, k, v, **masks):
        kind, _, rank = os.environ.get("FAULT", ":-1").partition(":")
        if self.training and rank == os.environ.get("RANK", "0"):
            FaultyAttention.calls += 1
            if FaultyAttention.calls == _CALL:
                time.sleep(_MOMENT_S)
                note_now()
                fail(kind)
            elif FaultyAttention.calls > _CALL:
                time.sleep(_SLOW_S)
        return super().attend(q, k, v, **masks)


def note_now() -> None:
    Path("fault").write_text(repr(time.monotonic()))


def fail(kind: str) -> None:
    if kind in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[kind])
    elif kind in _TO_LAUNCHER:
        os.kill(os.getppid(), _TO_LAUNCHER[kind])
    elif kind in _FAILURES:
        _FAILURES[kind]()


def be_wrong() -> None:
    raise ValueError("planned")


def hold_interpreter() -> None:
    """Let no thread of this process run any more."""
    ctypes.PyDLL(None).sleep(1000)


def kill_all() -> None:
    """Kill the launcher, the other ranks and this one."""
    launcher = psutil.Process(os.getppid())
    for process in (launcher, *launcher.children()):
        if process.pid != os.getpid():
            process.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def spoil_next_image(*, stall: bool) -> None:
    """Let this rank's next image be gone when it is read, or never answer, as a file on a network that is down."""
    real = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if path.suffix == ".png":
            note_now()
            Path.read_bytes = real
            path.rename(path.with_suffix(".gone"))
            if stall:
                os.mkfifo(path)
        return real(path)

    Path.read_bytes = read_bytes


def fill_disk() -> None:
    """Take all that is left of the disk that the environment names."""
    with (Path(os.environ["FAULT_DISK"]) / "filler").open("wb", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2


_FAILURES = {
    "raise": be_wrong,
    "hang": lambda: time.sleep(1000),
    "hold": hold_interpreter,
    "lose": lambda: spoil_next_image(stall=False),
    "stall": lambda: spoil_next_image(stall=True),
    "kill-all": kill_all,
    "fill": fill_disk,
}
