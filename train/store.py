"""Where MLflow keeps its runs, by URI: seen before MLflow is asked, which would wait for minutes or make the store."""

import os
import re
import socket
from pathlib import Path
from urllib.parse import urlsplit

from train.errors import TrackingError

_PORTS = {"http": 80, "https": 443, "postgresql": 5432, "mysql": 3306, "mssql": 1433}


def find_file(uri: str) -> Path | None:
    """Return the file of an SQLite store, sqlite:///relative or sqlite:////absolute; None for a server."""
    parts = urlsplit(uri)
    return Path(parts.path[1:]) if parts.scheme.startswith("sqlite") and len(parts.path) > 1 else None


def is_new(uri: str) -> bool:
    """Say whether the store is a file that MLflow will make when it is first used."""
    file = find_file(uri)
    return file is not None and not file.exists()


def check_store(uri: str) -> None:
    """Knock at a server's port, log into a database: once, where MLflow would retry for minutes; see a file's folder.

    Raises:
        TrackingError: If nobody answers there or lets us in, or the file could not be made.
    """
    try:
        parts = urlsplit(uri)
        file, port = find_file(uri), parts.port or _PORTS.get(parts.scheme.partition("+")[0])
        if port is not None:
            socket.create_connection((parts.hostname or "", port), timeout=5).close()
    except (OSError, ValueError) as error:
        raise TrackingError(
            f"tracking.uri {without_password(uri)}: cannot be reached ({error}); is the server running?"
        ) from error
    if file is None:
        if _is_database(uri):
            check_login(uri)
        return
    if file.is_dir():
        raise TrackingError(f"tracking.uri {uri}: {file} is a folder, wanted a file")
    if not (file.parent.is_dir() and os.access(file.parent, os.W_OK)):
        raise TrackingError(f"tracking.uri {uri}: {file.parent} is no folder that can be written to")


def _is_database(uri: str) -> bool:
    return urlsplit(uri).scheme.partition("+")[0] in ("postgresql", "mysql", "mssql")


def check_login(uri: str) -> None:
    """Open one connection to a database, and close it.

    Raises:
        TrackingError: If the driver is missing, or user, password or database are wrong.
    """
    from sqlalchemy import NullPool, create_engine
    from sqlalchemy.exc import SQLAlchemyError

    try:
        create_engine(uri, poolclass=NullPool).connect().close()
    except ImportError as error:
        raise TrackingError(
            f"tracking.uri {without_password(uri)}: its driver is missing ({error}); "
            "for postgresql://, install attention-zoo[postgres]"
        ) from error
    except SQLAlchemyError as error:
        said = " ".join(str(getattr(error, "orig", None) or error).split())
        raise TrackingError(f"tracking.uri {without_password(uri)}: cannot be used: {said}") from error


def without_password(uri: str) -> str:
    """Return a URI without the user and password it may hold."""
    return re.sub(r"//[^/]*@", "//", uri)
