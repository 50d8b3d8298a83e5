"""Freeze and unfreeze parameters by pattern, and remember on the model which were frozen on purpose."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from zoo.errors import UnknownNameError, ZooError

_RECORD = "_frozen_on_purpose"  # a set of parameter names, a plain attribute of the model given to `freeze`


def freeze(model: nn.Module, patterns: str | Iterable[str]) -> tuple[str, ...]:
    """Switch requires_grad off, in place, for every parameter that a pattern names; all patterns or none.

    A tied parameter is one tensor: naming it once freezes it under all its names.

    Args:
        model: Any module. It remembers the names, so that the audit can tell a freeze from an accident.
        patterns: Globs (`*` spans dots too) on parameter names, or on module paths, which freeze all below them:
            "patch_embed", "blocks.0", "blocks.*.attn.*", "*.bias".

    Returns:
        The names that are frozen now by these patterns, in the model's order.

    Raises:
        UnknownNameError: If a pattern names nothing; nothing is changed.
    """
    names = _select(model, patterns)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in names:
        parameters[name].requires_grad_(False)  # noqa: FBT003
    setattr(model, _RECORD, getattr(model, _RECORD, set()) | set(names))
    return names


def unfreeze(model: nn.Module, patterns: str | Iterable[str]) -> tuple[str, ...]:
    """Switch requires_grad on, in place, for every parameter that a pattern names; all patterns or none.

    Make the optimizer and wrap the model for DDP after it, not before: both read requires_grad once.

    Args:
        model: Any module.
        patterns: As for `freeze`.

    Returns:
        The names that are trainable now by these patterns, in the model's order.

    Raises:
        UnknownNameError: If a pattern names nothing; nothing is changed.
        ZooError: If a parameter of integers is named, which cannot be trained; nothing is changed.
    """
    names = _select(model, patterns)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in names:
        if not (parameters[name].is_floating_point() or parameters[name].is_complex()):
            raise ZooError(f"{name} is of dtype {parameters[name].dtype} and cannot be trained; name others")
    for name in names:
        parameters[name].requires_grad_(True)  # noqa: FBT003
    for path, module in model.named_modules():
        kept = {name for name in getattr(module, _RECORD, ()) if f"{path}.{name}".lstrip(".") not in names}
        if hasattr(module, _RECORD):
            setattr(module, _RECORD, kept)
    return names


def find_frozen(model: nn.Module) -> frozenset[str]:
    """Return the parameter names that were frozen on purpose, through this model or through a module of it."""
    return frozenset(
        f"{path}.{name}".lstrip(".") for path, module in model.named_modules() for name in getattr(module, _RECORD, ())
    )


def check_trainable(model: nn.Module) -> None:
    """Raise if a model has nothing to train, in the same words in a world of any size and on any device.

    Raises:
        ZooError: If no parameter requires a gradient; says how many were frozen on purpose.
    """
    message = find_nothing_trainable(model)
    if message:
        raise ZooError(message)


def find_nothing_trainable(model: nn.Module) -> str:
    """Return the sentence for a model that has nothing to train, or "" if it has."""
    parameters = list(model.parameters())
    if any(parameter.requires_grad for parameter in parameters):
        return ""
    named = find_frozen(model) & {name for name, _ in model.named_parameters()}
    return (
        f"no trainable parameters: all {len(parameters)} are frozen, {len(named)} of them by a freeze pattern; "
        "freeze less, or unfreeze the head"
    )


def _select(model: nn.Module, patterns: str | Iterable[str]) -> tuple[str, ...]:
    """Return the parameter names that the patterns name, ties completed, or raise UnknownNameError."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    modules = [path for path, module in model.named_modules(remove_duplicate=False) if path and _has_any(module)]
    chosen: set[int] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        paths = tuple(f"{path}." for path in modules if fnmatchcase(path, pattern))
        hits = [
            parameter
            for name, parameter in parameters.items()
            if fnmatchcase(name, pattern) or (paths and name.startswith(paths))
        ]
        if not hits:
            hint = "a pattern is a parameter's name, a module's path, or a glob over either ('*' is everything)"
            raise UnknownNameError("pattern", pattern, [*parameters, *modules], hint)
        chosen |= set(map(id, hits))
    return tuple(name for name, parameter in parameters.items() if id(parameter) in chosen)


def _has_any(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
