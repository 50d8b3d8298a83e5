"""How long MLflow's server is waited for: minutes where it matters, seconds where a training stands still meanwhile."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""Set unless the user has: a minute's outage is waited for and not four, and MLflow speaks only of trouble."""
_HURRIED = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "4"}


@contextmanager
def hurried() -> Iterator[None]:
    """Ask a server once, and for four seconds, while the block runs; MLflow reads the environment at each request."""
    before = {name: os.environ.get(name) for name in _HURRIED}
    os.environ.update(_HURRIED)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore SIGTERM for a while: a launcher sends it to the ranks that are left, while they say why they failed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
