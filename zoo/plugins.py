"""A user's own variants: files and modules that register them, loaded by name, all or nothing."""

import hashlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path

from zoo import registry
from zoo.card import PluginSource
from zoo.errors import PluginError, ZooError, did_you_mean
from zoo.plugin_files import is_file_module, name_module


@dataclass(frozen=True)
class Plugin:
    """A file, module or package that has registered variants.

    Attributes:
        source: What a card says of it.
        attentions: The variants that it registered.
        file: Its file, resolved; None where there is none.
        content: What the file held when it was loaded; it may have been edited since.
    """

    source: PluginSource
    attentions: tuple[str, ...]
    file: Path | None
    content: bytes | None = field(repr=False)

    def write_copy(self, folder: Path) -> Path | None:
        """Write the file, as it was loaded, into a folder, under a name that ends in .py; None if there is no file."""
        if self.content is None:
            return None
        name = self.source.name
        path = folder / (name if name.endswith(".py") else f"{name.rpartition('.')[2]}.py")
        path.write_bytes(self.content)
        return path


_LOADED: list[Plugin] = []


def load_plugins(names: str | Path | Iterable[str | Path]) -> tuple[Plugin, ...]:
    """Run files and modules that register attention variants: all of them, or nothing stays registered.

    A file that is loaded already, by whatever path, is not run again.

    Args:
        names: Each is the path of a .py file, or the name of a module that can be imported.

    Returns:
        What was loaded, in the order of `names`.

    Raises:
        PluginError: If one is missing, fails, registers nothing, or takes a name that is held; the message names the
            file, the line and the cause, and the registry is as it was.
    """
    given = [names] if isinstance(names, str | Path) else list(names)
    if not given:  # a server without torch asks for none
        return ()
    with undone_on_error():
        return tuple(_load(name) for name in given)


def find_plugin(attention: str) -> Plugin | None:
    """Return where a registered variant comes from; None for a built-in one.

    Raises:
        UnknownNameError: If it is not registered.
    """
    cls = registry.find_attention(attention)
    for plugin in _LOADED:
        if attention in plugin.attentions and _is_registered(plugin):
            return plugin
    if registry.is_built_in(cls):
        return None
    file = registry.find_file(cls)  # registered by a module that somebody else imported, or in a script or notebook
    return read_plugin(cls.__module__, file, (attention,))


def plugin_sources(attention: str) -> tuple[PluginSource, ...]:
    """Return what a card says of the plugins that a registered variant needs; empty for a built-in one."""
    plugin = find_plugin(attention)
    return () if plugin is None else (plugin.source,)


def record(plugin: Plugin) -> Plugin:
    """Remember what registered the variants of a plugin."""
    _LOADED.append(plugin)
    return plugin


@contextmanager
def blamed(what: str, file: Path | None) -> Iterator[None]:
    """Turn whatever a plugin's code raises into one line that names it, the line in its file, and the error."""
    try:
        yield
    except (Exception, SystemExit) as error:  # a script that ends itself is no plugin
        kind = "" if isinstance(error, ZooError) else f"{type(error).__name__}: "
        said = error.msg if isinstance(error, SyntaxError) else str(error).strip().partition("\n")[0]
        hint = ""
        if isinstance(error, ModuleNotFoundError) and file and error.name and _has_neighbour(file, error.name):
            hint = f"; a plugin's neighbours are no modules: set PYTHONPATH={file.parent}"
        raise PluginError(f"plugin {what}{_find_place(error, file)}: {kind}{said}{hint}") from error


def run(
    what: str, module: str, file: Path | None, *, distribution: str | None = None, version: str | None = None
) -> Plugin:
    """Import a module that registers variants, and remember it.

    Raises:
        PluginError: If it fails, or registers nothing.
    """
    before = registry.registered()
    with blamed(what, file):
        importlib.import_module(module)
    attentions = tuple(
        name
        for name, cls in registry.registered().items()
        if name not in before or f"{cls.__module__}.".startswith(f"{module}.")  # it may be imported already
    )
    if not attentions:
        raise PluginError(f"plugin {what}: registers no attention; decorate a class with @zoo.register_attention(NAME)")
    return record(read_plugin(module, file, attentions, distribution=distribution, version=version))


def read_plugin(
    module: str,
    file: Path | None,
    attentions: tuple[str, ...],
    *,
    distribution: str | None = None,
    version: str | None = None,
) -> Plugin:
    """Read what is to be known of a plugin; a file that stands alone goes by its own name, others by the module's."""
    alone = file is not None and (module == "__main__" or is_file_module(module))
    name = file.name if file is not None and alone else module
    content = file.read_bytes() if file is not None and file.is_file() else None
    digest = None if content is None else hashlib.sha256(content).hexdigest()
    source = PluginSource(name=name, sha256=digest, distribution=distribution, version=version)
    return Plugin(source, attentions, file, content)


def _load(name: str | Path) -> Plugin:
    text = str(name)
    if isinstance(name, Path) or text.endswith(".py") or os.sep in text or Path(text).is_file():
        return _load_file(Path(name))
    return _load_module(text)


def _load_file(path: Path) -> Plugin:
    if not path.exists():
        near = did_you_mean(path.name, (file.name for file in path.parent.glob("*.py")), most=0)
        raise PluginError(f"plugin {path}: no such file below {Path.cwd()}{near}")
    if path.suffix != ".py" or not path.is_file():
        raise PluginError(f"plugin {path}: wanted is a Python file, whose name ends in .py, or a module's name")
    file = path.resolve()
    known = _find_known(file)
    if known is not None:
        return known
    module = name_module(file)
    sys.modules.pop(module, None)  # from a loading whose variants are gone
    return run(str(path), module, file)


def _load_module(name: str) -> Plugin:
    if not all(part.isidentifier() for part in name.split(".")):
        raise PluginError(f"plugin {name!r}: no name of a module; a file is given by a path that ends in .py")
    with blamed(name, None):  # finding a submodule imports what is above it
        spec = _find_spec(name)
    if spec is None:
        file_hint = f"; did you mean {name}.py?" if Path(f"{name}.py").is_file() else ""
        raise PluginError(f"plugin {name}: no such module can be imported; a file is given as NAME.py{file_hint}")
    file = Path(spec.origin).resolve() if spec.has_location and spec.origin else None
    known = _find_known(file) if file else None
    if known is not None:
        return known
    return run(name, name, file)


def _find_spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):  # a package above it is missing, or is none
            return None
        raise


def _find_known(file: Path) -> Plugin | None:
    """Return the plugin that a file has become already, itself or a copy of it; None if it is new."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    for plugin in filter(_is_registered, _LOADED):
        if plugin.source.sha256 == digest:
            return plugin
        if plugin.file == file:
            raise PluginError(f"plugin {file}: has changed since it was loaded; start a new process to use it")
    classes = registry.registered()
    attentions = tuple(name for name, cls in classes.items() if registry.find_file(cls) == file)
    if not attentions:
        return None
    return record(read_plugin(classes[attentions[0]].__module__, file, attentions))


def _is_registered(plugin: Plugin) -> bool:
    return set(plugin.attentions) <= registry.registered().keys()


@contextmanager
def undone_on_error() -> Iterator[None]:
    """Leave the registry, and what is known of plugins, as they were if a block fails."""
    importlib.import_module("zoo.projections")  # the built-in variants are not to be taken back
    classes, loaded, modules = registry.registered(), list(_LOADED), set(sys.modules)
    fresh: set[str] = set()
    try:
        with registry.undone_on_error():
            try:
                yield
            finally:
                fresh = {cls.__module__ for name, cls in registry.registered().items() if name not in classes}
    except BaseException:
        _LOADED[:] = loaded
        fresh |= {name for name in sys.modules if is_file_module(name)}
        for name in fresh - modules:  # or a second try would import nothing, and so register nothing
            sys.modules.pop(name, None)
        raise


def _find_place(error: BaseException, file: Path | None) -> str:
    """Return ", line N" for the last line of `file` that ran; of another file, with its name, if none of it did."""
    if isinstance(error, SyntaxError) and error.filename:
        places = [(error.filename, error.lineno)]
    else:
        places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    own = [line for name, line in places if file is not None and name == str(file)]
    if own:
        return f", line {own[-1]}"
    foreign = [(name, line) for name, line in places if not name.startswith("<") and "importlib" not in name]
    foreign = [(name, line) for name, line in foreign if Path(name).parent != Path(__file__).parent]
    return f", {foreign[-1][0]} line {foreign[-1][1]}" if foreign else ""


def _has_neighbour(file: Path | None, module: str) -> bool:
    top = module.partition(".")[0]
    return file is not None and any((file.parent / name).exists() for name in (top, f"{top}.py"))
