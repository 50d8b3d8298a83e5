"""Attention variants by name: one dict, one decorator, one lookup.

A variant is built in, or comes from a plugin (`zoo.plugins`), or from an installed package that names it under the
entry-point group `zoo.attentions` (`zoo.entry_points`). Importing it takes no torch: a server of ONNX bundles has none.
"""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from zoo.errors import PluginError, UnknownNameError
from zoo.plugin_files import is_file_module

if TYPE_CHECKING:
    from torch import nn

_ATTENTIONS: "dict[str, type[nn.Module]]" = {}
_TAKEN = {"timm": "timm's own attention, as restore_attention puts it back"}


def register_attention(name: str) -> "Callable[[type[nn.Module]], type[nn.Module]]":
    """Register a variant class under `name`.

    Args:
        name: How recipes and commands call the variant: letters, digits, `_`, `-` and `.`.

    Returns:
        The decorator; it hands the class back unchanged.

    Raises:
        PluginError: If the name is none, or is taken; the message says by whom. Or if no module class is decorated.
    """
    if not isinstance(name, str):  # the decorator without its parentheses
        raise PluginError(f'register_attention wants a name first: @zoo.register_attention("my_name"), got {name!r}')
    if not re.fullmatch(r"[\w.-]+", name):
        raise PluginError(f"attention name {name!r}: wanted are letters, digits, _ - and . alone")
    import_module("zoo.projections")  # the built-in variants are first, whatever was imported first

    from torch import nn

    def add(cls: type[nn.Module]) -> type[nn.Module]:
        if name in _ATTENTIONS or name in _TAKEN:
            holder = _TAKEN.get(name) or describe_holder(name)
            raise PluginError(f"attention {name!r} is already {holder}; choose another name")
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise PluginError(f"attention {name!r}: wanted is a class derived from torch's nn.Module, got {cls!r}")
        _ATTENTIONS[name] = cls
        return cls

    return add


def find_attention(name: str) -> "type[nn.Module]":
    """Return the class registered under `name`; an installed package that offers it is loaded now.

    Raises:
        UnknownNameError: With the nearest name, if nobody registers it.
        PluginError: If an installed package offers the name and fails to load.
    """
    if name not in _ATTENTIONS:
        import_module("zoo.projections")
    if name not in _ATTENTIONS:
        from zoo.entry_points import offered_names, register_offered  # here: most processes never need it

        hint = register_offered(name)
        if name not in _ATTENTIONS:
            raise UnknownNameError("attention", name, {*_ATTENTIONS, *offered_names()}, hint)
    return _ATTENTIONS[name]


def list_attentions() -> tuple[str, ...]:
    """Return the registered names, sorted, those of installed packages among them.

    A package that fails to load is left out, with a PluginWarning that names it.
    """
    from zoo.entry_points import register_all_offered

    import_module("zoo.projections")
    register_all_offered()
    return tuple(sorted(_ATTENTIONS))


def is_built_in(cls: "type[nn.Module]") -> bool:
    """Say whether a class is the zoo's own; a plugin's file is a module below `zoo.plugin_files`."""
    return cls.__module__.startswith("zoo.") and not is_file_module(cls.__module__)


def find_file(cls: "type[nn.Module]") -> Path | None:
    """Return the file that a class is written in, resolved; None for one typed into an interpreter."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return Path(file).resolve() if file else None


def describe_holder(name: str) -> str:
    """Say in a few words which class holds a registered name, and where that class comes from."""
    cls = _ATTENTIONS[name]
    where = "built in" if is_built_in(cls) else f"of {find_file(cls) or cls.__module__}"
    return f"{cls.__qualname__}, {where}"


def registered() -> "dict[str, type[nn.Module]]":
    """Return what is registered now, by name; nothing is looked for."""
    return dict(_ATTENTIONS)


@contextmanager
def undone_on_error() -> Iterator[None]:
    """Take back every registration of a block that fails."""
    before = registered()
    try:
        yield
    except BaseException:
        _ATTENTIONS.clear()
        _ATTENTIONS.update(before)
        raise
