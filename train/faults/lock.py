"""One training at a time in a run's folder; and the runs that ended without a word, which nobody could mark."""

import json
import logging
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from train.errors import CheckpointError, TrackingError
from train.faults.marking import find_status, mark_ended
from train.saving.latest import is_latest

logger = logging.getLogger(__name__)

_LOCK, _NOTE = ".running.lock", "running.json"
_PATIENCE_S = 8.0  # of a killed process's data workers, which hold the lock until they notice


@contextmanager
def occupied(folder: Path) -> Iterator[None]:
    """Hold a run's folder while the block runs, and note there who does; the operating system frees it at any end.

    Raises:
        CheckpointError: If another process trains in it, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / _LOCK, timeout=_PATIENCE_S)
        lock.acquire()
    except Timeout as error:
        raise CheckpointError(
            f"{folder}: {describe_holder(folder)} trains in it; wait for its end or stop it, then resume"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written ({error.strerror})") from error
    try:
        _leave_note(folder)
        yield
        (folder / _NOTE).unlink(missing_ok=True)
    finally:
        lock.release()


def _leave_note(folder: Path) -> None:
    note = {"pid": os.getpid(), "host": platform.node(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    try:
        (folder / _NOTE).write_text(json.dumps(note), encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written ({error.strerror})") from error


def describe_holder(folder: Path) -> str:
    """Say who holds a run's folder, from the note that is left there."""
    try:
        note = json.loads((folder / _NOTE).read_text(encoding="utf-8"))
        return f"process {note['pid']} on {note['host']} (since {note['since']})"
    except (OSError, ValueError, KeyError, TypeError):  # no more than a hint
        return "another process"


def mark_abandoned(run_dir: Path, uri: str) -> list[str]:
    """Mark as FAILED each run below `run_dir` that is RUNNING in the store, and that nobody trains any more.

    Args:
        run_dir: OUTPUT_DIR/NAME, the folder of the runs' folders.
        uri: The tracking store.

    Returns:
        The runs' ids. One that cannot be marked is left for the next start, with a warning.
    """
    marked = []
    for note in sorted(run_dir.glob(f"*/{_NOTE}")):
        folder = note.parent
        if is_latest(folder):
            continue
        lock = FileLock(folder / _LOCK, timeout=0)
        try:
            lock.acquire()
        except Timeout:
            continue  # alive
        except OSError as error:
            logger.warning("%s cannot be looked at: %s", folder, error)
            continue
        try:
            if find_status(uri, folder.name) == "RUNNING":
                reason = f"{describe_holder(folder)} ended without a word: killed, or its machine went down"
                if not mark_ended(uri, folder.name, "FAILED", reason):
                    continue
                logger.warning("run %s is marked FAILED now: %s", folder.name, reason)
                marked.append(folder.name)
            note.unlink(missing_ok=True)
        except (TrackingError, OSError) as error:
            logger.warning("run %s is left for the next start to look at: %s", folder.name, error)
        finally:
            lock.release()
    return marked
