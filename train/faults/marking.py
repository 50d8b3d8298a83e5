"""Write into an MLflow run how it ended, for one that cannot do so itself: from another rank, thread or process."""

import logging
import threading
from typing import Literal

from train.errors import TrackingError
from train.store import find_file, is_new, without_password

logger = logging.getLogger(__name__)

FAILURE = "failure"
_PATIENCE_S = 15.0  # a launcher kills what still stands 30 s after its SIGTERM
TAG_LIMIT = 5000

Status = Literal["FAILED", "KILLED"]


def mark_ended(uri: str, run_id: str, status: Status, reason: str) -> bool:
    """End a run in the store, with the reason as its tag `failure`; False, and a warning, if that cannot be done.

    Args:
        uri: The tracking store.
        run_id: The run.
        status: How it ended.
        reason: Why, in a line.
    """
    outcome: list[BaseException | None] = []

    def work() -> None:
        try:
            _write(uri, run_id, status, reason)
            outcome.append(None)
        except Exception as error:  # told below; the cause of the end matters more than its record
            outcome.append(error)

    thread = threading.Thread(target=work, name="mark", daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
    if outcome == [None]:
        return True
    why = " ".join(str(outcome[0]).split())[:200] if outcome else f"no answer in {_PATIENCE_S:g} s"
    logger.warning("the MLflow run %s could not be marked %s in %s: %s", run_id, status, without_password(uri), why)
    return False


def find_status(uri: str, run_id: str) -> str | None:
    """Return a run's status, as "RUNNING"; None if the store does not have it.

    Raises:
        TrackingError: If the store cannot be read.
    """
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    if is_new(uri):  # the client would make it
        return None
    try:
        return str(MlflowClient(tracking_uri=uri).get_run(run_id).info.status)
    except (MlflowException, SQLAlchemyError, OSError) as error:
        if getattr(error, "error_code", "") == "RESOURCE_DOES_NOT_EXIST":
            return None
        said = " ".join(str(error).split())[:200]
        raise TrackingError(f"tracking.uri {without_password(uri)}: run {run_id} cannot be read: {said}") from error


def is_reachable(uri: str, *, same_machine: bool) -> bool:
    """Say whether a process may write to the store: one that is a file lies on the main process's machine."""
    return same_machine or find_file(uri) is None


def _write(uri: str, run_id: str, status: Status, reason: str) -> None:
    from mlflow import MlflowClient

    if is_new(uri):  # the client would make an empty one
        raise FileNotFoundError(f"no file {find_file(uri)}")
    client = MlflowClient(tracking_uri=uri)
    client.set_tag(run_id, FAILURE, reason[:TAG_LIMIT])
    client.set_terminated(run_id, status)
