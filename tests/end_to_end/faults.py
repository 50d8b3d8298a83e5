"""Start a training that fails as planned, wait until all its processes are gone, and look at what it leaves."""

import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.train.tiny import write_images
from train.saving.checkpoint import read_state

ROOT = Path(__file__).parent.parent.parent
PLUGIN = Path(__file__).parent / "faulty_attention.py"
STEPS = 108  # 72 images on two ranks of two: 18 steps an epoch
_TRAIN = f"""
name: tiny
model:
  backbone: vit_tiny_patch16_224
  attention: faulty
  plugins: [{PLUGIN}]
  timm_kwargs: {{img_size: 8, patch_size: 4, embed_dim: 16, depth: 1, num_heads: 2}}
data: {{root: images}}
schedule: {{epochs: 6, warmup_epochs: 1}}
loop: {{batch_size_per_rank: 2}}
log: {{every_steps: 1, progress: false}}
checkpoint: {{every_steps: 1, keep: 3}}
publish: {{enabled: false}}
"""
_MARK = "FAULT_TEST"
_LONGEST_S = 600.0
_ALARMING = re.compile(r"Traceback|Error|error|Exception|terminate|what\(\)|FATAL|fatal|core dumped")
_OF_LAUNCHER = re.compile(r"[WEI]\d{4} ")  # its own log


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and what has to come of it.

    Attributes:
        name: For people.
        plan: The plugin's KIND:RANK; "" for a run to the end.
        told: What the one line begins with, a pattern; "" where nobody is left to tell.
        status: The MLflow run's.
        seen_s: Seconds after which it can be seen.
        flags: Beside those of all runs.
        raised: Whether a rank's own traceback may stand above the line.
    """

    name: str
    plan: str
    told: str = ""
    status: str = "FAILED"
    seen_s: float = 0.0
    flags: tuple[str, ...] = ()
    raised: bool = False


@dataclass(frozen=True)
class End:
    """How a launch ended.

    Attributes:
        text: All that was printed.
        status: The exit status of the command.
        seconds: From the fault to the end of the last process; None where there was no fault.
        left: Command lines of what was left a while after the command's end.
        run_status: The MLflow run's.
        tags: Its tags that begin with `failure`.
        step: The last checkpoint's, which is whole.
    """

    text: str
    status: int
    seconds: float | None
    left: tuple[str, ...]
    run_status: str
    tags: dict[str, str]
    step: int

    @property
    def told(self) -> list[str]:
        """The lines in which the end was told."""
        return re.findall(r"^(?:rank \d+: )?(?:error|stopped): .*$", self.text, re.MULTILINE)

    def alarming_before(self, told: str) -> list[str]:
        """Return what was printed before the line and looks like trouble; the launcher's own log does not count."""
        above = self.text.partition(told)[0].splitlines()
        return [line for line in above if _ALARMING.search(line) and not _OF_LAUNCHER.match(line)]


@dataclass
class Folder:
    """A user's folder: a recipe, images, a store; every launch in it goes on from the last.

    Attributes:
        path: It.
        shell: The variables of a new shell.
        output: Where runs are written, relative to it.
        store: The MLflow store's file, relative to it.
    """

    path: Path
    shell: dict[str, str]
    output: str = "runs"
    store: str = "mlflow.db"
    launches: int = field(default=0)

    def prepare(self, empty_store: Path) -> "Folder":
        """Write what a run needs."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_images(self.path / "images", train=24)
        (self.path / "tiny.yaml").write_text(_TRAIN, encoding="utf-8")
        if not (self.path / self.store).exists():
            (self.path / self.store).write_bytes(empty_store.read_bytes())
        return self

    def launch(self, *flags: str, plan: str = "", ranks: int = 2, **environ: str) -> End:
        """Run `accelerate launch ... -m train tiny.yaml --resume auto` to its end, however it ends.

        Args:
            flags: Further ones.
            plan: The plugin's KIND:RANK.
            ranks: With 1 it is `python -m train`, without a launcher.
            environ: Further variables.
        """
        for name in ("fault",):
            (self.path / name).unlink(missing_ok=True)
        process, mark, log = self.start(*flags, plan=plan, ranks=ranks, **environ)
        try:
            status = process.wait(_LONGEST_S)
            ended = wait_for_end(mark, 35)
        finally:
            left = kill_all(mark)
            process.wait()
        fault = self.path / "fault"
        seconds = ended - float(fault.read_text()) if fault.exists() else None
        self.mend()
        return self.look(log.read_text(errors="replace"), status, seconds, left)

    def start(
        self, *flags: str, plan: str = "", ranks: int = 2, terminal: int | None = None, **environ: str
    ) -> "tuple[subprocess.Popen[bytes], str, Path]":
        """Start it; return the process, the mark that all its processes bear, and where it prints to."""
        command = [sys.executable, "-m", "train"]
        if ranks > 1:
            command = ["accelerate", "launch", "--config_file", str(ROOT / "accelerate_config.yaml")]
            command += ["--main_process_port", "0", "--num_processes", str(ranks), "-m", "train"]
        command += ["tiny.yaml", "--resume", "auto", "--output_dir", self.output]
        command += ["--tracking.uri", f"sqlite:///{self.path / self.store}", *flags]
        mark, self.launches = uuid.uuid4().hex, self.launches + 1
        log = self.path / f"launch-{self.launches}.log"
        own = {_MARK: mark, "FAULT": plan or ":-1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with log.open("wb") as file:
            process = subprocess.Popen(
                command,
                cwd=self.path,
                env=self.shell | own | environ,
                stdin=subprocess.DEVNULL if terminal is None else terminal,
                stdout=file if terminal is None else terminal,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return process, mark, log

    def mend(self) -> None:
        """Put spoiled images back."""
        for gone in (self.path / "images").rglob("*.gone"):
            image = gone.with_suffix(".png")
            image.unlink(missing_ok=True)
            gone.rename(image)

    def look(self, text: str = "", status: int = 0, seconds: float | None = None, left: Sequence[str] = ()) -> End:
        """Look at what is left."""
        run_status, tags = self.read_store()
        checkpoints = sorted(self.path.glob(f"{self.output}/tiny/*/checkpoints/step-*"), key=lambda path: path.name)
        step = read_state(checkpoints[-1]).step if checkpoints else -1
        return End(text, status, seconds, tuple(left), run_status, tags, step)

    def read_store(self) -> tuple[str, dict[str, str]]:
        """Return status and failures of the one run."""
        with closing(sqlite3.connect(self.path / self.store)) as store:
            runs = store.execute("SELECT run_uuid, status FROM runs").fetchall()
            tags = dict(store.execute("SELECT key, value FROM tags WHERE key LIKE 'failure%'"))
        assert len(runs) <= 1, f"{len(runs)} runs"
        return (runs[0][1] if runs else ""), tags


def find_marked(mark: str) -> dict[int, str]:
    """Return pid and command line of the processes that were started under a mark and have not ended."""
    wanted, found = f"{_MARK}={mark}".encode(), {}
    for folder in Path("/proc").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            if folder.name.isdecimal() and wanted in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def wait_for_end(mark: str, timeout_s: float) -> float:
    """Wait until no process bears the mark, or time is up; return when that was."""
    deadline = time.monotonic() + timeout_s
    while find_marked(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    return time.monotonic()


def kill_all(mark: str) -> list[str]:
    """Kill what still bears the mark; return the command lines."""
    found = find_marked(mark)
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return list(found.values())
