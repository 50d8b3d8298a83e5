"""The MLflow server of deploy/mlflow/compose.yaml, as a process of this machine on the tests' PostgreSQL."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.deploy.compose import read_compose
from tests.deploy.postgres import PASSWORD, Cluster, free_port
from tests.end_to_end.conftest import wait_until_ready


class TrackingServer:
    """The compose file's `mlflow` service, word for word but for its port, its folder and its number of workers.

    Args:
        cluster: Takes the place of the service `postgres`.
        database: A database there.
        folder: Takes the place of the volume: artifacts and the log.
        environ: What the user has put into .env, beside the password.
    """

    def __init__(self, cluster: Cluster, database: str, folder: Path, environ: dict[str, str] | None = None) -> None:
        service = read_compose({"POSTGRES_PASSWORD": PASSWORD, **(environ or {})})["mlflow"]
        port, self.artifacts, self.log = free_port(), folder / "artifacts", folder / "server.log"
        here = {"--host=0.0.0.0": "--host=127.0.0.1", "--port=5000": f"--port={port}", "--workers=4": "--workers=2"}
        here |= {"--artifacts-destination=/training/artifacts": f"--artifacts-destination={self.artifacts}"}
        words = [*service["entrypoint"], *service["command"]]
        assert here.keys() <= set(words), words
        self.command = [str(Path(sys.executable).parent / words[0]), *(here.get(word, word) for word in words[1:])]
        moved = service["environment"]["MLFLOW_BACKEND_STORE_URI"]
        moved = moved.replace("postgres:5432/mlflow", f"127.0.0.1:{cluster.port}/{database}")
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
        self.environ = {**inherited, **service["environment"], "MLFLOW_BACKEND_STORE_URI": moved}
        self.uri = f"http://127.0.0.1:{port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and wait until its health check, the compose file's own path, answers."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command, cwd=self.log.parent, env=self.environ, stdout=log, stderr=log, start_new_session=True
            )
        wait_until_ready(f"{self.uri}/health", self._process, self.log)

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        """End the server and its workers."""
        if self._process is None:
            return
        os.killpg(self._process.pid, how)
        self._process.wait(60)
        self._process = None


@contextmanager
def tracking_server(
    cluster: Cluster, database: str, folder: Path, environ: dict[str, str] | None = None
) -> Iterator[TrackingServer]:
    """Start a server, and end it by SIGTERM."""
    server = TrackingServer(cluster, database, folder, environ)
    try:
        server.start()
        yield server
        server.kill(signal.SIGTERM)
    finally:
        server.kill()
