"""A PostgreSQL cluster for tests: the real server of the machine, in a folder of its own, gone at the end."""

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import psycopg

USER, PASSWORD = "mlflow", "s3cret/p@ss:w%rd"  # what a URI must escape
_QUICK = ("fsync=off", "synchronous_commit=off", "full_page_writes=off")  # nothing here outlives a crash


@dataclass(frozen=True)
class Cluster:
    """A running server on 127.0.0.1 with the user `mlflow`, who may make databases."""

    port: int

    def uri(self, database: str, password: str = PASSWORD) -> str:
        """Return the URI of a database, password and all."""
        return f"postgresql://{USER}:{quote(password, safe='')}@127.0.0.1:{self.port}/{database}"

    def create_database(self, name: str) -> str:
        """Make an empty database; return its name."""
        with psycopg.connect(self.uri("postgres"), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')
        return name


def find_programs() -> Path | None:
    """Return the folder of the newest installed server's programs; Debian keeps them off the PATH."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda program: int(program.parts[-3]))
    found = str(versions[-1]) if versions else shutil.which("initdb")
    return Path(found).parent if found else None


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running_cluster(programs: Path) -> Iterator[Cluster]:
    """Make a cluster, start its server, and stop and delete both at the end."""
    who = _unprivileged()
    folder = Path(tempfile.mkdtemp(prefix="postgres-"))  # pytest's own folders are closed to other users
    server = None
    try:
        if who:
            os.chown(folder, pwd.getpwnam(who["user"]).pw_uid, -1)
        server, cluster = _start(programs, folder, who)
        yield cluster
    finally:
        if server is not None:
            server.send_signal(signal.SIGINT)  # a fast shutdown: clients are cut off
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(30)
            server.kill()
            server.wait()
        shutil.rmtree(folder)


def _unprivileged() -> dict[str, str]:
    """Return the user to be, for `subprocess`: the server refuses root."""
    if os.getuid() != 0:
        return {}
    names = {entry.pw_name for entry in pwd.getpwall()}
    return {"user": "postgres" if "postgres" in names else "nobody"}


def _start(programs: Path, folder: Path, who: dict[str, str]) -> tuple["subprocess.Popen[bytes]", Cluster]:
    secret, data, log = folder / "password", folder / "data", folder / "log"
    secret.write_text(PASSWORD)
    secret.chmod(0o644)
    make = [programs / "initdb", "--pgdata", data, "--username", USER, "--pwfile", secret, "--auth=scram-sha-256"]
    make += ["--no-sync", "--encoding=UTF8", "--locale=C"]
    subprocess.run(make, **who, cwd=folder, check=True, capture_output=True)
    cluster = Cluster(free_port())
    settings = (*_QUICK, "listen_addresses=127.0.0.1", f"port={cluster.port}", "unix_socket_directories=")
    with log.open("wb") as file:
        server = subprocess.Popen(
            [programs / "postgres", "-D", data, *(word for setting in settings for word in ("-c", setting))],
            **who,
            cwd=folder,
            stdout=file,
            stderr=file,
        )
    deadline = time.monotonic() + 60
    while True:
        try:
            psycopg.connect(cluster.uri("postgres"), connect_timeout=5).close()
            return server, cluster
        except psycopg.OperationalError as error:
            if server.poll() is not None or time.monotonic() > deadline:
                server.kill()
                raise RuntimeError(f"PostgreSQL does not start: {log.read_text()}") from error
            time.sleep(0.1)
