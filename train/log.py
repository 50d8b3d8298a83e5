"""Logging that knows its rank: the main process speaks, other ranks only warn, and say who they are."""

import logging
import os
import sys

from tqdm import tqdm

_TELLS_TWICE = "mlflow.store.db.utils"  # logs, with a traceback, every error of a database that it raises
_LIBRARIES = ("alembic", "mlflow", "httpx", "urllib3", "timm", "accelerate", "torch.distributed")


class _AboveTheBar(logging.StreamHandler):  # type: ignore[type-arg]
    """A handler that writes through tqdm, so that a line never lands in the middle of a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=sys.stderr)
            self.flush()
        except Exception:  # as every handler: a terminal that was closed must not end what is logged about
            self.handleError(record)


def rank_of_environment() -> int:
    """Return this process's rank as its launcher wrote it, 0 where nothing was launched."""
    return int(os.environ.get("RANK", "0"))


def set_up_logging() -> None:
    """Configure the root logger once, in `__main__`: INFO on the main process, warnings with their rank on others."""
    rank = rank_of_environment()
    handler = _AboveTheBar()
    who = "" if rank == 0 else f"rank {rank}: "
    handler.setFormatter(logging.Formatter(f"%(asctime)s {who}%(levelname).1s %(message)s", datefmt="%H:%M:%S"))
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, handlers=[handler], force=True)
    for name in _LIBRARIES:  # their INFO is about themselves
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger(_TELLS_TWICE).setLevel(logging.CRITICAL)
