"""Give the tensors of a swapped model timm's own names, from its file alone: q, k and v joined as timm keeps them."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zoo.errors import BundleError, SwapError
from zoo.projections import Projection
from zoo.registry import list_attentions
from zoo.swap import swap_attention


@dataclass(frozen=True)
class StockNames:
    """What a file holds, by the names of stock timm.

    Attributes:
        attention: The variant that it was saved from.
        tensors: What stock timm has a name for, and whatever is unknown.
        ties: {further name: first name}; a tie of a part of a fused tensor keeps the part's own names.
        own: Tensors that only the variant has, as a whole module may, by the swapped model's names.
        lacking: Names of such tensors that are not in the file.
    """

    attention: str
    tensors: dict[str, Tensor]
    ties: dict[str, str]
    own: dict[str, Tensor]
    lacking: tuple[str, ...] = ()


def to_stock_names(
    tensors: Mapping[str, Tensor], ties: Mapping[str, str], model: nn.Module, attention: str | None
) -> StockNames:
    """Turn a swapped model's tensors into those of stock timm.

    Args:
        tensors: As a file holds them, each under every name.
        ties: {further name: first name} among them.
        model: The stock model that they are for; only its structure is read, and its own sizes do not matter.
        attention: The variant they were saved from; None asks the names.

    Raises:
        UnknownNameError: If there is no such variant.
        SwapError: If the model cannot have it.
        BundleError: If a projection lacks a tensor, or has one of the wrong shape; the message names it.
    """
    found = guess_attention(tensors, model) if attention is None else attention
    if found == "linear":  # timm's own names
        return StockNames(found, dict(tensors), dict(ties), {})
    renamed, homes = dict(tensors), dict[str, str]()
    twin = _swapped(model, found)
    special = twin.state_dict().keys() - model.state_dict().keys()
    for name, projection in twin.named_modules():
        if isinstance(projection, Projection):
            special -= {f"{name}.{key}" for key in projection.state_dict()}
            _join(renamed, homes, projection, f"{name}.")
    own = {key: renamed.pop(key) for key in sorted(special) if key in renamed}
    lacking = tuple(sorted(special - own.keys()))
    return StockNames(found, renamed, _rename_ties(ties, homes), own, lacking)


def guess_attention(tensors: Mapping[str, Tensor], model: nn.Module) -> str:
    """Return the variant whose names are the nearest to those of `tensors`; "linear" has timm's own."""
    distances = {"linear": len(model.state_dict().keys() ^ tensors.keys())}
    if distances["linear"]:
        for attention in list_attentions():
            try:
                names = _swapped(model, attention).state_dict().keys()
            except SwapError:  # a variant that refuses this model has not written its file
                continue
            distances[attention] = len(names ^ tensors.keys())
    return min(distances, key=lambda attention: distances[attention])


def _swapped(model: nn.Module, attention: str) -> nn.Module:
    """Return a copy of the model with this attention that holds no numbers."""
    tensors = [*model.parameters(), *model.buffers()]
    memo: dict[int, object] = {}
    for tensor in tensors:
        bare = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare
    twin = copy.deepcopy(model, memo)
    swap_attention(twin, attention)
    return twin


def _join(tensors: dict[str, Tensor], homes: dict[str, str], projection: Projection, prefix: str) -> None:
    """Replace what one projection stores by its `weight` and `bias`, in place; note in `homes` who went where."""
    own = {key: tensors.pop(prefix + key) for key in projection.state_dict() if prefix + key in tensors}
    if not own:
        return  # stock names, or none: whoever loads them says so
    if missing := [prefix + key for key in projection.state_dict() if key not in own]:
        raise BundleError(f"{missing[0]} is missing")
    wrong = [key for key, tensor in projection.state_dict().items() if tensor.shape != own[key].shape]
    if wrong:
        got, wanted = (tuple(state[wrong[0]].shape) for state in (own, projection.state_dict()))
        raise BundleError(f"{prefix}{wrong[0]}: got {got}, wanted {wanted}")
    real = projection.to_empty(device="cpu").to(next(iter(own.values())).dtype)
    real.load_state_dict(own, strict=True)
    for kind in ("weight", "bias"):
        if prefix + kind in tensors:
            raise BundleError(f"{prefix}{kind} stands beside {prefix}{next(iter(own))}: both cannot be meant")
        joined = getattr(real, kind)
        if joined is not None:
            tensors[prefix + kind] = joined.detach()
            homes |= {prefix + key: prefix + kind for key in own if key.endswith("bias") == (kind == "bias")}


def _rename_ties(ties: Mapping[str, str], homes: Mapping[str, str]) -> dict[str, str]:
    """Name ties as stock timm would: fused tensors are tied where all that went into them is."""
    stock: dict[str, str] = {}
    for name, kept in ties.items():
        home, kept_home = homes.get(name, name), homes.get(kept, kept)
        parts = [part for part, where in homes.items() if where == home]
        if home != kept_home and all(homes.get(ties.get(part, "")) == kept_home for part in parts):
            stock[home] = kept_home
        else:
            stock[name] = kept
    return stock
