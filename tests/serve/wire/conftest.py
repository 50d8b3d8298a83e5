"""`python -m serve` as a process of its own, asked over real sockets."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

LIMITS = {
    "max-body-bytes": 200_000,
    "max-pixels": 10_000,
    "max-images": 4,
    "max-buffered-bytes": 300_000,
    "body-timeout-s": 2,
    "head-timeout-s": 2,
    "log-level": "warning",
}


@dataclass(frozen=True)
class Wire:
    """A server in a process."""

    url: str
    pid: int
    log: Path

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        assert parts.hostname
        assert parts.port
        return parts.hostname, parts.port

    def talk(self, *parts: bytes, end: bool = False, pause_s: float = 0) -> bytes:
        """Send the parts, with a pause after each, and return all that comes until the server closes."""
        with socket.create_connection(self.address, timeout=30) as connection:
            for part in parts:
                connection.sendall(part)
                time.sleep(pause_s)
            if end:
                connection.shutdown(socket.SHUT_WR)
            received = b""
            while more := connection.recv(65_536):
                received += more
            return received

    def metric(self, name: str) -> float:
        """Read a gauge without labels."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return float(next(line.split()[1] for line in lines if line.split()[0] == name))


@pytest.fixture(scope="session")
def wire(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    """The tiny bundle, served with small limits; what it logs as a warning or worse fails the test run."""
    folder = tmp_path_factory.mktemp("wire")
    log = folder / "server.log"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = [text for name, value in LIMITS.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "serve", str(bundle), "--port", str(port), *flags]
    env = {key: value for key, value in os.environ.items() if not key.startswith(("SERVE_", "MLFLOW_"))}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    with log.open("w") as file:
        server = subprocess.Popen(command, cwd=folder, env=env, stdout=file, stderr=file)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(f"{url}/ready", server, log)
        yield Wire(url, server.pid, log)
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0, log.read_text()
        assert "Traceback" not in log.read_text(), log.read_text()
    finally:
        server.kill()
        server.wait()


def wait_until_ready(url: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        assert server.poll() is None, log.read_text()
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    pytest.fail(f"not ready: {log.read_text()}")
