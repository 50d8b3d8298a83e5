"""The product as its user runs it: real commands, each in a process of its own, in a folder of its own."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parent.parent.parent
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class Job:
    """A finished command: where it ran and what it said."""

    folder: Path
    status: int
    out: str
    err: str


Launch = Callable[..., Job]
Serve = Callable[..., AbstractContextManager[str]]


@pytest.fixture(scope="session")
def shell() -> dict[str, str]:
    """The environment of a new shell with this interpreter's commands first: no rank, no MLflow store."""
    prefixes = ("MLFLOW_", "SERVE_", "ACCELERATE_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(prefixes) and key not in _LAUNCHERS}
    return kept | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"}


@pytest.fixture(scope="session")
def launch(shell: dict[str, str]) -> Launch:
    """Run `accelerate launch --config_file accelerate_config.yaml [--num_processes N] -m train ...` in a folder."""

    def run(folder: Path, *arguments: str, num_processes: int | None = None, timeout_s: float = 900) -> Job:
        ranks = [] if num_processes is None else ["--num_processes", str(num_processes)]
        config = str(ROOT / "accelerate_config.yaml")
        command = ["accelerate", "launch", "--config_file", config, *ranks, "-m", "train", *arguments]
        done = subprocess.run(
            command, cwd=folder, env=shell, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        return Job(folder, done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture(scope="session")
def main_job(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The recipe `digits`, whole, as the README trains it."""
    job = launch(tmp_path_factory.mktemp("main"))
    assert job.status == 0, f"{job.out}\n{job.err}"
    return job


@pytest.fixture(scope="session")
def serve(shell: dict[str, str]) -> Serve:
    """Start a server in a folder, wait until it answers, hand out its address, and end it by SIGTERM with status 0."""

    @contextmanager
    def started(folder: Path, *command: str, ready: str = "/ready") -> Iterator[str]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        log = folder / f"server-{port}.log"
        with log.open("w") as file:
            words, streams = [*command, "--port", str(port)], {"stdout": file, "stderr": file}
            server = subprocess.Popen(words, cwd=folder, env=shell, start_new_session=True, **streams)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(url + ready, server, log)
            yield url
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) in (0, -signal.SIGTERM), log.read_text()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)  # MLflow's server starts workers of its own
            server.wait()

    return started


def wait_until_ready(url: str, server: "subprocess.Popen[bytes]", log: Path, timeout_s: float = 180) -> None:
    """Ask until 200; fail with the server's log if it ends or is late."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    pytest.fail(f"{url} was not ready after {timeout_s} s: {log.read_text()}")
