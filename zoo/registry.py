"""Attention variants by name: one dict, one decorator, one lookup."""

from collections.abc import Callable

from torch import nn

from zoo.errors import UnknownNameError

_ATTENTIONS: dict[str, type[nn.Module]] = {}


def register_attention(name: str) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Register a variant class under `name`.

    Args:
        name: How recipes and commands call the variant.

    Returns:
        The decorator; it hands the class back unchanged.

    Raises:
        ValueError: If the name is taken.
    """

    def add(cls: type[nn.Module]) -> type[nn.Module]:
        if name in _ATTENTIONS:
            raise ValueError(f"attention {name!r} is already {_ATTENTIONS[name].__qualname__}")
        _ATTENTIONS[name] = cls
        return cls

    return add


def find_attention(name: str) -> type[nn.Module]:
    """Return the class registered under `name`; raise UnknownNameError with the nearest name."""
    if name not in _ATTENTIONS:
        raise UnknownNameError("attention", name, _ATTENTIONS)
    return _ATTENTIONS[name]


def list_attentions() -> tuple[str, ...]:
    """Return the registered names, sorted."""
    return tuple(sorted(_ATTENTIONS))
