"""The servers that are compared, each as its users start it, and what all their processes cost in CPU and memory."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from tests.benchmarks.serving.load import Form

ROOT = Path(__file__).parent.parent.parent.parent


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Server:
    """A started server.

    Attributes:
        name: What the table calls it.
        command: Its command line; "{port}" stands for its port.
        invocations: Path of its endpoint.
        ready: Path that answers 200 once it answers.
        form: How images go: their bytes, MLflow's JSON with base64, or {"image": base64}.
        folder: Where it runs.
        environment: Added to this process's.
    """

    name: str
    command: tuple[str, ...]
    invocations: str = "/invocations"
    ready: str = "/ready"
    form: Form = "bytes"
    folder: Path = ROOT
    environment: Mapping[str, str] | None = None

    def __enter__(self) -> Self:
        self.port = free_port()
        words = [word.format(port=self.port) for word in self.command]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), **(self.environment or {})}
        self.log = self.folder / f"{self.name.replace(' ', '-')}-{self.port}.log"
        start = time.perf_counter()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                words, cwd=self.folder, env=environ, stdout=log, stderr=log, start_new_session=True
            )
        self._tree = psutil.Process(self._process.pid)
        self._wait()
        self.ready_s = time.perf_counter() - start
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self.status = self._process.wait(60)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    @property
    def url(self) -> str:
        """Where requests go."""
        return f"http://127.0.0.1:{self.port}{self.invocations}"

    def cpu_s(self) -> float:
        """Return CPU seconds, user and system, of all its processes so far."""
        total = 0.0
        for process in (self._tree, *self._tree.children(recursive=True)):
            with suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def rss_mb(self) -> float:
        """Return the resident memory of all its processes, in MB."""
        total = 0
        for process in (self._tree, *self._tree.children(recursive=True)):
            with suppress(psutil.Error):
                total += process.memory_info().rss
        return total / 1e6

    def get(self, path: str) -> str:
        """Return what a GET of `path` answers."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            text: str = answer.read().decode()
        return text

    def _wait(self, timeout_s: float = 180) -> None:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise RuntimeError(f"{self.name} ended: {self.log.read_text()[-2000:]}")
            with suppress(OSError):
                self.get(self.ready)
                return
            time.sleep(0.02)
        raise RuntimeError(f"{self.name} is not ready after {timeout_s} s: {self.log.read_text()[-2000:]}")


def our_server(model: str, *flags: str, name: str = "attention-zoo", folder: Path = ROOT) -> Server:
    """Return this project's endpoint for a model's URI or a bundle."""
    return Server(name, (sys.executable, "-m", "serve", model, "--port", "{port}", *flags), folder=folder)


def mlflow_server(model_uri: str, tracking_uri: str, folder: Path) -> Server:
    """Return `mlflow models serve` for a registered version."""
    scripts = str(Path(sys.executable).parent)
    command = (f"{scripts}/mlflow", "models", "serve", "-m", model_uri, "--env-manager", "local", "--port", "{port}")
    environ = {"MLFLOW_TRACKING_URI": tracking_uri, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    return Server("mlflow", command, ready="/ping", form="mlflow", folder=folder, environment=environ)


def lit_server(python: str, bundle: Path, max_batch: int, folder: Path) -> Server:
    """Return a bare LitServe app on the same bundle; `python` is an interpreter that has LitServe."""
    script = str(Path(__file__).with_name("lit_app.py"))
    command = (python, script, str(bundle), "--port", "{port}", "--max-batch", str(max_batch))
    return Server("LitServe", command, invocations="/predict", ready="/health", form="field", folder=folder)
