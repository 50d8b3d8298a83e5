"""Tie parameters by name: one tensor under several names, stepped once, saved once."""

from collections.abc import Iterable, Mapping

from torch import nn

from zoo.auditing.snapshots import bare_model
from zoo.errors import ZooError
from zoo.patterns import find_matches


def tie(model: nn.Module, *groups: str | Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Make the parameters that each group names one nn.Parameter, in place; all groups or none.

    Of each group the first one stays, with its values; those of the others are lost. What was tied to one of them
    before is tied to it still, so groups may form chains. Tie before the optimizer is made and before the model is
    wrapped for DDP: both hold the parameters that they were given.

    Args:
        model: Any module.
        groups: For each tie its parameters: full names, globs and ranges as in `zoo.patterns`, in a list or in one
            text with `=` between them. A glob in a group of its own ties all that it matches: ["a.weight", "b.weight"],
            "a.weight = b.weight", "blocks.*.attn.qkv.to_q", "blocks.0-5.mlp.fc1.weight".

    Returns:
        The names of each tensor that the groups tied, the one whose values stayed first, then in the model's order.

    Raises:
        UnknownNameError: If a pattern names no parameter; nothing is changed.
        ZooError: If a group is one name alone, if its parameters differ in shape, dtype, device, class or in being
            frozen, if a name is a buffer's, or if the model is wrapped; nothing is changed.
    """
    if bare_model(model) is not model:
        raise ZooError(f"tie the model before it is wrapped: {type(model).__name__} holds the parameters it was given")
    before = dict(model.named_parameters(remove_duplicate=False))
    after, kept = dict(before), dict[str, None]()
    for group in groups:
        first, *others = _find_names(model, before, group)
        for other in others:
            _check_alike(first, before[first], other, before[other])
        joined = {id(after[name]) for name in (first, *others)}
        after.update({name: after[first] for name, tensor in after.items() if id(tensor) in joined})
        kept[first] = None
    for name, tensor in after.items():
        if tensor is not before[name]:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, tensor)  # torch's recurrent layers keep a list of their own by it
    return _list_ties(before, after, kept)


def _find_names(model: nn.Module, parameters: Mapping[str, nn.Parameter], group: str | Iterable[str]) -> list[str]:
    """Return the names that a group means, each once, or raise if there are not two."""
    texts = [group] if isinstance(group, str) else list(group)
    patterns = [part.strip() for text in texts for part in text.split("=")]
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    for pattern in patterns:
        if pattern in buffers:
            raise ZooError(f"cannot tie {pattern}: it is a buffer, and only parameters are tied")
    names = list(dict.fromkeys(name for pattern in patterns for name in find_matches(pattern, parameters)))
    if len(names) > 1:
        return names
    if len(patterns) > 1:
        raise ZooError(f"cannot tie {names[0]} to itself: {' = '.join(patterns)} is one parameter")
    if not patterns:
        raise ZooError("cannot tie an empty group; name two parameters, or a glob that matches several")
    name = names[0]
    raise ZooError(f"cannot tie {name} alone: a tie wants two, as in '{name} = OTHER', or a glob that matches several")


def _check_alike(first: str, kept: nn.Parameter, other: str, tensor: nn.Parameter) -> None:
    """Raise if two parameters could not be one without changing what either is."""
    for what, got, wanted in (
        ("class", type(tensor).__name__, type(kept).__name__),
        ("shape", tuple(tensor.shape), tuple(kept.shape)),
        ("dtype", tensor.dtype, kept.dtype),
        ("device", tensor.device, kept.device),
    ):
        if got != wanted:
            raise ZooError(f"cannot tie {other} to {first}: its {what} is {got}, wanted {wanted}")
    if tensor.requires_grad != kept.requires_grad:
        frozen, free = (other, first) if kept.requires_grad else (first, other)
        raise ZooError(f"cannot tie {other} to {first}: {frozen} is frozen and {free} is not; freeze both, or neither")


def _list_ties(
    before: Mapping[str, nn.Parameter], after: Mapping[str, nn.Parameter], kept: Iterable[str]
) -> tuple[tuple[str, ...], ...]:
    firsts: dict[int, str] = {}
    for name in kept:
        if after[name] is before[name]:  # a later group may have tied it to another
            firsts.setdefault(id(before[name]), name)
    return tuple(
        (first, *(name for name, tensor in after.items() if id(tensor) == identity and name != first))
        for identity, first in firsts.items()
    )
