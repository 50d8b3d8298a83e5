"""Variants that installed packages offer, under the entry-point group `zoo.attentions`: NAME = "module:Class".

    [project.entry-points."zoo.attentions"]
    mine = "my_package.attention:MyProjection"

The class is registered as NAME. A value without a class ("my_package.attention") is a module that registers by itself.
Nothing is imported before a name is asked for that is not known, or all are listed.
"""

import importlib.util
import warnings
from collections import defaultdict
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from zoo import registry
from zoo.errors import PluginError, PluginWarning
from zoo.plugins import blamed, read_plugin, record, run, undone_on_error

GROUP = "zoo.attentions"
_SEEN: set[tuple[str, str, str]] = set()  # what was loaded, or found to be broken and said so: (package, name, value)


def offered_names() -> tuple[str, ...]:
    """Return the names in the group, loaded or not."""
    return tuple(sorted(entry_points(group=GROUP).names))


def register_offered(name: str) -> str:
    """Register what may bear `name`: the entry point of that name, else the modules that register by themselves.

    Returns:
        A hint for the case that nothing did: which packages failed; "" if none.

    Raises:
        PluginError: If the entry point of that name fails, or two packages offer the name.
    """
    offers = _group()
    if name in offers:
        _register(name, offers[name])
        return ""
    failures = [
        failure
        for other, found in offers.items()
        if any(":" not in entry.value for entry in found) and (failure := _try(other, found))
    ]
    return "; ".join(failures)


def register_all_offered() -> None:
    """Register whatever is offered; what fails is said once, as a PluginWarning, and left out."""
    for name, found in _group().items():
        if failure := _try(name, found):
            warnings.warn(failure, PluginWarning, stacklevel=3)


def _group() -> dict[str, list[EntryPoint]]:
    """Return the entry points by name; one that is there twice has two owners."""
    offers: dict[str, list[EntryPoint]] = defaultdict(list)
    for entry in entry_points(group=GROUP):
        offers[entry.name].append(entry)
    return offers


def _try(name: str, found: list[EntryPoint]) -> str:
    """Register an offer unless it was tried before; return what went wrong, or ""."""
    keys = {(_owner(entry), entry.name, entry.value) for entry in found}
    if keys <= _SEEN:
        return ""
    _SEEN.update(keys)
    try:
        _register(name, found)
    except PluginError as error:
        return str(error)
    return ""


def _register(name: str, found: list[EntryPoint]) -> None:
    if len(found) > 1:
        owners = " and ".join(sorted(_owner(entry) for entry in found))
        raise PluginError(f"attention {name!r} is offered by {owners}: uninstall all but one")
    (entry,) = found
    owner = _owner(entry)
    what = f"{entry.value} of the package {owner}"
    with undone_on_error():
        with blamed(what, None):
            spec = importlib.util.find_spec(entry.module)
        file = Path(spec.origin).resolve() if spec and spec.has_location and spec.origin else None
        dist = entry.dist
        about = {} if dist is None else {"distribution": dist.name, "version": dist.version}
        if not entry.attr:
            run(what, entry.module, file, **about)
            return
        with blamed(what, file):
            cls = entry.load()
            if registry.registered().get(name) is not cls:  # its module may have a decorator too
                registry.register_attention(name)(cls)
        record(read_plugin(entry.module, file, (name,), **about))


def _owner(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "an unnamed package"
