"""A plugin's file as a module: `zoo.plugin_files.STEM_HASH`, which clashes with no other module of that name.

It is a module like any other: tracebacks and `inspect` show the file, dataclasses and `copy` work, and a process that
multiprocessing spawns imports it by its name, since the environment tells it the file.
"""

import hashlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

__path__: list[str] = []  # to the import system a package, whose modules `_Finder` finds

_FILES = "ZOO_PLUGIN_FILES"  # nothing but the environment reaches a spawned process before its first import


def name_module(file: Path) -> str:
    """Name the module that a file becomes, after the file and by a hash of its path; it can be imported from now on.

    Args:
        file: A Python file, resolved.
    """
    os.environ[_FILES] = json.dumps(sorted({*_files(), str(file)}))
    return _name(str(file))


def is_file_module(name: str) -> bool:
    """Say whether a module is a plugin's file."""
    return name.startswith(f"{__name__}.")


def _name(file: str) -> str:
    stem = re.sub(r"\W", "_", Path(file).stem)
    return f"{__name__}.{stem}_{hashlib.sha256(os.fsencode(file)).hexdigest()[:8]}"


def _files() -> list[str]:
    files = json.loads(os.environ.get(_FILES, "[]"))
    assert isinstance(files, list)
    return files


class _Loader(SourceFileLoader):
    """Compiles the file as it stands: a cached .pyc may be older, and no folder of a user's is written to."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.get_filename(fullname)), self.path)


class _Finder(MetaPathFinder):
    """Finds the modules that plugin files become, in this process and in those it spawns."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if not is_file_module(fullname):
            return None
        file = next((file for file in _files() if _name(file) == fullname), None)
        if file is None:
            return None
        return importlib.util.spec_from_file_location(fullname, file, loader=_Loader(fullname, file))


sys.meta_path.append(_Finder())
