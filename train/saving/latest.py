"""Point `OUTPUT_DIR/NAME/latest` at the folder of the run that was published last, so that it has a name to type."""

import logging
import os
from pathlib import Path

NAME = "latest"

logger = logging.getLogger(__name__)


def point_latest(folder: Path) -> None:
    """Make `latest`, beside a run's folder, a link to it; the link changes at once or not at all.

    A file system without links leaves it out, and the log says so: nothing depends on it. What stands there and is no
    link is somebody's own and stays.
    """
    link = folder.parent / NAME
    if link.exists() and not link.is_symlink():
        logger.warning("%s is no link, so it stays; the run is in %s", link, folder)
        return
    aside = folder.parent / f".{NAME}-{os.getpid()}"
    try:
        aside.symlink_to(folder.name, target_is_directory=True)
        aside.replace(link)
    except OSError as error:
        logger.warning("%s cannot be linked to %s: %s", link, folder, error)


def is_latest(path: Path) -> bool:
    """Say whether a folder of a name's runs is that link, and so no run of its own."""
    return path.name == NAME and path.is_symlink()
