"""Where things lie in an MLflow model of ours: the bundle among its artifacts, a plugin's file among its code."""

from pathlib import Path
from typing import Final

PLUGINS: Final = "plugins"
"""Folder of a plugin's file, below the code that MLflow stores with a model."""


def list_plugin_files(bundle: Path) -> list[Path]:
    """Return the plugin's files that travel with the model in whose artifacts `bundle` lies."""
    return sorted((bundle.parent.parent / "code" / PLUGINS).glob("*.py"))
