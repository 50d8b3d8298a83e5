"""Ties that timm's own form cannot hold: of q, k or v alone, which it keeps as a part of one fused weight."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

from pydantic import JsonValue
from torch import nn

from zoo.errors import BackboneError, BundleError
from zoo.files.tensor_files import same_bits
from zoo.files.ties import find_ties, tie
from zoo.projections import KINDS, Projection, part_parameter

TIES = "part_ties"
"""The key beside a card's own in a folder of timm's: {further name: first name} as the swapped model calls them."""


def untie_parts(model: nn.Module) -> dict[str, str]:
    """Give every name of a tie that a restore would refuse a tensor of its own, in place; the function stays.

    Returns:
        {further name: first name} of what was untied; empty where every tie can be kept.
    """
    before = find_ties(model.state_dict())
    while broken := _find_broken(model):
        for name, parameter in list(model.named_parameters(remove_duplicate=False)):
            if id(parameter) in broken:
                owner, _, leaf = name.rpartition(".")
                own = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                model.get_submodule(owner)._parameters[leaf] = own
    after = find_ties(model.state_dict())
    return {name: kept for name, kept in before.items() if name not in after}


def read_part_ties(ours: JsonValue, file: Path) -> dict[str, str]:
    """Return the ties that `untie_parts` gave, from our key of timm's configuration; raise BundleError if damaged."""
    ties = ours.get(TIES, {}) if isinstance(ours, dict) else {}
    if not isinstance(ties, dict):
        raise BundleError(f"{file}: {TIES}: got a {type(ties).__name__}, wanted an object of names")
    for name, kept in ties.items():
        if not isinstance(kept, str) or kept in ties:
            raise BundleError(f"{file}: {TIES}: {name} is tied to {kept!r}, wanted the name of an untied tensor")
    return {name: str(kept) for name, kept in ties.items()}


def describe_untied(ties: Mapping[str, str]) -> list[str]:
    """Say of each tie that a file has and a model has not what became of it."""
    return [f"{name} and {kept}: tied in the file, two tensors now" for name, kept in ties.items()]


def tie_known(model: nn.Module, ties: Mapping[str, str]) -> dict[str, str]:
    """Tie in place what the model has, equal, under both names; return the other ties."""
    state = model.state_dict()
    known = {
        name: kept
        for name, kept in ties.items()
        if name in state and kept in state and (state[name].is_meta or same_bits(state[name], state[kept]))
    }
    try:
        tie(model, known | find_ties(state))
    except ValueError as error:
        raise BackboneError(str(error)) from error
    return {name: kept for name, kept in ties.items() if name not in known}


def _find_broken(model: nn.Module) -> set[int]:
    """Return the ids of tied parameters that a restore would have to put into more than one tensor.

    Two fused tensors are one only if all that goes into them is. Untying one part may so break the ties of others.
    """
    homes: dict[int, set[tuple[object, ...]]] = defaultdict(set)
    twice, inside = set[int](), set[str]()
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Projection):
            inside |= {f"{path}.{name}" for name, _ in module.named_parameters(remove_duplicate=False)}
            order = module.layout.num_heads if len(module.layout.parts) > 1 else 1
            for kind in KINDS:
                parts = tuple(id(part_parameter(module, part, kind)) for part in module.layout.parts)
                for identity in parts:
                    homes[identity].add((kind, parts, order, *module.layout.sizes.values()))
                twice |= {identity for identity, count in Counter(parts).items() if count > 1}
    names = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    outside = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name not in inside}
    return {
        identity
        for identity, found in homes.items()
        if names[identity] > 1 and (len(found) > 1 or identity in twice or identity in outside)
    }
