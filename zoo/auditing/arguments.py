"""What the audit and the snapshot are given: a model, and one optimizer or several."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn

from zoo.errors import ZooError


class OptimizerLike(Protocol):
    """What the audit reads of an optimizer: torch's own, and Accelerate's wrapper of one."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups, each with "params" and "lr"."""
        ...


Optimizers = OptimizerLike | Sequence[OptimizerLike]


def check_model(model: object, verb: str) -> None:
    """Raise if a value is no module.

    Args:
        model: What the user gave.
        verb: What was to be done with it, for the message.

    Raises:
        ZooError: If it is something else; a class is told from a module of it.
    """
    if isinstance(model, nn.Module):
        return
    if isinstance(model, type):
        raise ZooError(f"{verb} wants a model, an nn.Module, got the class {model.__name__}: make one of it first")
    raise ZooError(f"{verb} wants a model, an nn.Module, got {_show(model)}")


def list_optimizers(optimizer: Optimizers | None, verb: str) -> list[OptimizerLike]:
    """Return one optimizer, several or none as a list.

    Raises:
        ZooError: If one of them has no param_groups.
    """
    if optimizer is None:
        return []
    several = isinstance(optimizer, list | tuple)
    optimizers: list[Any] = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    for place, value in enumerate(optimizers):
        if isinstance(value, type) or not hasattr(value, "param_groups"):
            got = f"{_show(value)} at place {place}" if several else _show(value)
            raise ZooError(f"{verb} wants an optimizer, or a list of them, got {got}: it has no param_groups")
    return optimizers


def _show(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    plain = isinstance(value, str | int | float | None)
    return f"{value!r:.60}" if plain else f"a {type(value).__name__}"
