"""Stand-ins for SLURM's commands: two nodes that are both this machine, and a batch script on the first of them."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

JOB = 4321
# the command once for each node, each with its number; the status of the last that failed
SRUN = """
echo "srun $1 $2" >>"$CALLS"
shift 2
for node in $(seq 0 $((SLURM_JOB_NUM_NODES - 1))); do
  SLURM_NODEID=$node "$@" >"$CALLS.out$node" 2>&1 &
  echo $! >"$CALLS.node$node"
done
status=0
for node in $(seq 0 $((SLURM_JOB_NUM_NODES - 1))); do wait $(cat "$CALLS.node$node") || status=$?; done
exit $status
"""
SCONTROL = r"""
echo "scontrol $*" >>"$CALLS"
if [ "$1" = show ]; then printf '127.0.0.1\nother\n'; fi
"""
# a signal for the step goes to all of its processes, launchers and ranks
SCANCEL = f"""
echo "scancel $*" >>"$CALLS"
{sys.executable} - "$CALLS".node* <<'PY'
import contextlib, pathlib, psutil, sys
launchers = [psutil.Process(int(pathlib.Path(file).read_text())) for file in sys.argv[1:]]
for process in [each for launcher in launchers for each in (launcher, *launcher.children(recursive=True))]:
    with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile, as its launcher was told to
        process.terminate()
PY
"""


def write_command(file: Path, text: str) -> None:
    """Write a bash script that can be called by its name."""
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"#!/bin/bash\n{text}\n")
    file.chmod(0o755)


class Job:
    """A batch script as SLURM runs it.

    Args:
        script: The script.
        folder: Where it was submitted: a checkout, with `activate` of its environment in bin/.
        environ: The environment it was submitted with.
    """

    def __init__(self, script: Path, folder: Path, environ: dict[str, str]) -> None:
        for name, text in {"srun": SRUN, "scontrol": SCONTROL, "scancel": SCANCEL}.items():
            write_command(folder / "bin" / name, text)
        path = f"{folder / 'bin'}{os.pathsep}{Path(sys.executable).parent}"
        (folder / "bin" / "activate").write_text(f'export PATH="{path}{os.pathsep}$PATH"\n')
        slurm = {
            "SLURM_SUBMIT_DIR": str(folder),
            "SLURM_JOB_ID": str(JOB),
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_JOB_NODELIST": "node[01-02]",
            "SLURM_CPUS_PER_TASK": "1",
            "VENV": str(folder),
            "CALLS": str(folder / "calls"),
            "OMP_NUM_THREADS": "1",
        }
        self.environ = {key: value for key, value in environ.items() if not key.startswith("SLURM_")} | slurm
        self._script, self._folder = script, folder
        self._process: subprocess.Popen[bytes] | None = None

    def submit(self, *words: str, **environ: str) -> None:
        """Start the script, which SLURM has copied to a folder of its own."""
        with (self._folder / "slurm.out").open("ab") as log:
            self._process = subprocess.Popen(
                ["bash", self._script, *words], cwd="/", env=self.environ | environ, stdout=log, stderr=log
            )

    def send(self, number: signal.Signals) -> None:
        """Signal the script's shell alone."""
        assert self._process is not None
        self._process.send_signal(number)

    def wait_for(self, what: Callable[[], bool]) -> None:
        """Wait until something is true; fail if the job ends before."""
        assert self._process is not None
        deadline = time.monotonic() + 120
        while not what():
            assert self._process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.05)

    def finish(self) -> int:
        """Wait for the end and return the status."""
        assert self._process is not None
        return self._process.wait(300)

    def kill(self) -> None:
        """End whatever is left of the job."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # another user's, or gone
                if process.environ().get("CALLS") == self.environ["CALLS"]:
                    process.kill()
        if self._process is not None:
            self._process.wait()

    @property
    def calls(self) -> list[str]:
        """What was asked of SLURM, in order."""
        return (self._folder / "calls").read_text().splitlines()

    @property
    def said(self) -> str:
        """The job's output, then that of each node."""
        files = [self._folder / "slurm.out", *sorted(self._folder.glob("calls.out*"))]
        return "".join(f"--- {file.name}\n{file.read_text()}" for file in files)
