"""Tied tensors: one tensor under several names of a model's state_dict."""

from collections.abc import Mapping
from itertools import pairwise

from torch import Tensor, nn


def find_ties(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Map every further name of a tied tensor to its first name.

    Args:
        state: A state_dict, its tensors sharing storage as the model's own do.

    Returns:
        {further name: first name}, empty when no tensor has two names.

    Raises:
        ValueError: If two tensors overlap without being the same: a file cannot say that, a copy would untie them.
    """
    first: dict[tuple[object, ...], str] = {}
    ties: dict[str, str] = {}
    for name, tensor in state.items():
        if tensor.numel():
            kept = first.setdefault(_identity(tensor), name)
            if kept != name:
                ties[name] = kept
    spans = sorted((*_span(state[name]), name) for name in first.values())
    for (_, _, end, name), (_, start, _, other) in pairwise(spans):
        if start < end and _span(state[name])[0] == _span(state[other])[0]:
            raise ValueError(f"{name} and {other} share memory but differ in shape or strides; untie them first")
    return ties


def tie(model: nn.Module, ties: Mapping[str, str]) -> None:
    """Make the names in `ties` one tensor each, in place; the tensor under the first name stays.

    Args:
        model: The model.
        ties: {further name: first name}, as `find_ties` gives.

    Raises:
        ValueError: If the model already ties names that `ties` does not: loading would overwrite one with the other.
    """
    for name, kept in find_ties(model.state_dict()).items():
        if ties.get(name, name) != ties.get(kept, kept):
            raise ValueError(f"{name} and {kept} are one tensor in this model, but were saved as two")
    for name, kept in ties.items():
        owner, leaf = _locate(model, name)
        source, source_leaf = _locate(model, kept)
        for slot in ("_parameters", "_buffers"):
            if leaf in getattr(owner, slot) and source_leaf in getattr(source, slot):
                getattr(owner, slot)[leaf] = getattr(source, slot)[source_leaf]
                break
        else:
            raise ValueError(f"cannot tie {name} to {kept}: one is a parameter, the other is not")


def _locate(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    owner, _, leaf = name.rpartition(".")
    return model.get_submodule(owner), leaf


def _identity(tensor: Tensor) -> tuple[object, ...]:
    return (str(tensor.device), tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _span(tensor: Tensor) -> tuple[str, int, int]:
    """Return device, first and one past the last byte that the tensor touches."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
