"""What a pattern names among the tensors of a model.

head.bias                 a full name
blocks.0                  a path: all below it
*.bias, blocks.*.attn     globs over names and paths; `*` spans dots too
blocks.0-5                a range of indices, first and last included; also inside a path: stages.1.blocks.0-3.mlp
blocks.6-                 the same to the last index there is
all                       everything, as `*`
all but head              everything but what stands behind it; many: all but head, norm and blocks.10-
"""

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from zoo.errors import UnknownNameError, ZooError

_RANGE = re.compile(r"(?:^|(?<=\.))(\d+)-(\d*)(?=\.|$)")
_ALL_BUT = re.compile(r"all\s+but\s+(.*)")
_LISTED = re.compile(r"\s*,\s*(?:and\s+)?|\s+and\s+")
_HINT = "a pattern is a name, a path, a glob over either, a range as in blocks.0-5, 'all', or 'all but head'"
_NAMES_HINT = "wanted is a parameter's full name, a glob over them, or a range as in blocks.0-5.norm1.weight"


def select(tensors: Mapping[str, object], patterns: str | Iterable[str]) -> tuple[str, ...]:
    """Return the names of all that the patterns name, in the model's order.

    Args:
        tensors: Every name with what it stands for. What has two names is chosen, or left out by "all but", under both
            if either is named.
        patterns: One pattern, or several that add up; see the top of this file. "all but ..." stands alone.

    Raises:
        UnknownNameError: If a pattern names nothing, or an index beyond the last.
        ZooError: If a range is empty, or "all but ..." leaves nothing or stands beside another pattern.
    """
    wanted = [patterns] if isinstance(patterns, str) else list(patterns)
    left = next((pattern for pattern in wanted if _ALL_BUT.fullmatch(pattern)), None)
    if left is not None and len(wanted) > 1:
        other = next((pattern for pattern in wanted if pattern != left), left)
        raise ZooError(
            f"{left!r} names {other!r} too, unless that is left out: give it alone, or write '{left} and {other}'"
        )
    paths = _list_paths(tensors)
    listed = wanted if left is None else _LISTED.split(left.partition("but")[2].strip())
    named = {name for pattern in listed for name in _find_below(pattern, tensors, paths)}
    held = {id(tensors[name]) for name in named}
    chosen = tuple(name for name, tensor in tensors.items() if (id(tensor) in held) == (left is None))
    if left is not None and not chosen:
        raise ZooError(f"{left!r} leaves out everything, and names nothing")
    return chosen


def find_matches(pattern: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return the names that one pattern of full names, globs and ranges matches, in order.

    Raises:
        UnknownNameError: If there is none, or an index lies beyond the last.
        ZooError: If a range is empty.
    """
    known = tuple(names)
    globs = _expand(pattern, _list_paths(known))
    found = tuple(name for name in known if any(fnmatchcase(name, glob) for glob in globs))
    if not found:
        raise _unknown(pattern, known, "parameter", _NAMES_HINT)
    return found


def _find_below(pattern: str, tensors: Iterable[str], paths: tuple[str, ...]) -> list[str]:
    """Return the names that a pattern matches, or whose path it does."""
    if pattern == "all" and "all" not in paths:
        return list(tensors)
    globs = _expand(pattern, paths)
    hits = {path for path in paths if any(fnmatchcase(path, glob) for glob in globs)}
    if not hits:
        raise _unknown(pattern, paths, "pattern", _HINT)
    return [name for name in tensors if not hits.isdisjoint(_ancestors(name))]


def _expand(pattern: str, paths: tuple[str, ...]) -> list[str]:
    """Write a pattern with ranges out as globs, one for each index; none if nothing is numbered there."""
    found = _RANGE.search(pattern)
    if found is None:
        return [pattern]
    before, after = pattern[: found.start()], pattern[found.end() :]
    stacks = {stack: held for stack, held in _list_stacks(paths).items() if fnmatchcase(stack, before[:-1])}
    if not stacks:
        return []
    first = int(found[1])
    last = int(found[2]) if found[2] else max(max(held) for held in stacks.values())
    if first > last and found[2]:
        raise ZooError(f"{pattern!r}: the range {found[0]} is empty; the lower index comes first: {last}-{first}")
    for stack, held in stacks.items():
        if (last if found[2] else first) > max(held):
            near = f"{before}{min(first, max(held))}-{max(held)}{after}"
            raise UnknownNameError("pattern", pattern, [near], _describe_stack(stack, held))
    indices = sorted({index for held in stacks.values() for index in held if first <= index <= last})
    return [glob for index in indices for glob in _expand(f"{before}{index}{after}", paths)]


def _unknown(pattern: str, known: tuple[str, ...], kind: str, hint: str) -> UnknownNameError:
    """Say that a pattern names nothing, and how many there are where it counts too far."""
    stacks, parts = _list_stacks(_list_paths(known)), pattern.split(".")
    for depth, part in enumerate(parts):
        stack = ".".join(parts[:depth])
        if part.isdecimal() and stack in stacks and int(part) not in stacks[stack]:
            return UnknownNameError(kind, pattern, known, _describe_stack(stack, stacks[stack]))
    many = "; several patterns are a list: [a, b]" if "," in pattern else ""
    return UnknownNameError(kind, pattern, known, hint + many)


def _describe_stack(stack: str, held: set[int]) -> str:
    return f"{stack or 'the model'} holds {len(held)}, {min(held)} to {max(held)}"


def _list_paths(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names and every path above one, each once, in order."""
    return tuple(dict.fromkeys(path for name in names for path in _ancestors(name)))


def _list_stacks(paths: Iterable[str]) -> dict[str, set[int]]:
    """Map each path that holds numbered children to their indices."""
    stacks: dict[str, set[int]] = {}
    for path in paths:
        stack, _, last = path.rpartition(".")
        if last.isdecimal():
            stacks.setdefault(stack, set()).add(int(last))
    return stacks


def _ancestors(name: str) -> list[str]:
    """Return "a", "a.b" and "a.b.c" for "a.b.c"."""
    parts = name.split(".")
    return [".".join(parts[: depth + 1]) for depth in range(len(parts))]
