"""The checks that need a model and its optimizer alone, each for one way of not training as the owner believes."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from zoo.findings import Finding
from zoo.freezing import find_frozen, find_nothing_trainable
from zoo.snapshots import OptimizerLike, Snapshot, first_names

_LOST = "not moved, trained, saved or synchronised"
_INTERNALS = frozenset(vars(nn.Module()))  # nn.Module's own attributes: registries, hooks, flags


def check_registered(model: nn.Module) -> Iterator[Finding]:
    """Find float tensors and modules in plain attributes, lists and dicts.

    They are not moved by `.to`, not trained, not saved and, under DDP, not synchronised.
    """
    known: set[int] = {id(tensor) for tensor in [*model.parameters(), *model.buffers()]} | set(map(id, model.modules()))
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in _INTERNALS:
                yield from _walk(f"{path}.{name}".lstrip("."), value, known)


def _walk(name: str, value: Any, known: set[int]) -> Iterator[Finding]:
    if not isinstance(value, Tensor | nn.Module | Mapping | list | tuple) or id(value) in known:
        return
    known.add(id(value))
    if isinstance(value, Tensor):
        # a tensor with a grad_fn is computed from others, as weight_norm's weight is
        if (value.is_floating_point() or value.is_complex()) and value.grad_fn is None:
            kind = "an nn.Parameter in a plain container" if isinstance(value, nn.Parameter) else "a plain tensor"
            message = (
                f"is {kind} of shape {tuple(value.shape)}, neither parameter nor buffer of the model: {_LOST}; "
                "make it an nn.Parameter (many: nn.ParameterList) or register_buffer it"
            )
            yield Finding("registered", "error", name, message)
    elif isinstance(value, nn.Module):
        tensors = [*value.parameters(), *value.buffers()]
        hidden = [tensor for tensor in tensors if id(tensor) not in known]
        if hidden:
            message = (
                f"is a {type(value).__name__} in a plain container, with {len(hidden)} tensors: {_LOST}; "
                "use nn.ModuleList or nn.ModuleDict"
            )
            yield Finding("registered", "error", name, message)
    else:
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _walk(f"{name}[{key!r}]", item, known)


def check_requires_grad(model: nn.Module) -> Iterator[Finding]:
    """Find parameters that nobody froze by name and that will not train; and a model with nothing to train."""
    nothing = find_nothing_trainable(model)
    if nothing:
        yield Finding("requires_grad", "error", "", nothing)
    named = find_frozen(model)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and name not in named:
            message = "requires_grad is off and no freeze pattern named it: zoo.freeze it by name, or zoo.unfreeze it"
            yield Finding("requires_grad", "error", name, message)


def check_optimizer(model: nn.Module, optimizer: OptimizerLike, before: Snapshot | None = None) -> Iterator[Finding]:
    """Find what the optimizer misses, holds twice, or holds though it is not the model's."""
    names = first_names(dict(model.named_parameters(remove_duplicate=False)))
    places: dict[int, list[int]] = {}
    orphans: list[tuple[str, Tensor]] = []
    for index, group in enumerate(optimizer.param_groups):
        for place, tensor in enumerate(group["params"]):
            places.setdefault(id(tensor), []).append(index)
            if id(tensor) not in names:
                was = before.name_of(tensor) if before is not None else ""
                orphans.append((was or f"group {index}, tensor {place}", tensor))
    missing = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in places
    }
    for name in missing:
        message = "is trainable and in no optimizer group: make the optimizer from the model as it is now, or freeze it"
        yield Finding("optimizer", "error", name, message)
    for name, parameter in model.named_parameters():
        groups = places.get(id(parameter), [])
        if len(groups) > 1:
            message = (
                f"is held {len(groups)} times by the optimizer, in groups {groups}: each step would move it so often"
            )
            yield Finding("optimizer", "error", name, message)
        if groups and not parameter.requires_grad:
            yield Finding("optimizer", "note", name, "is frozen and in the optimizer, which leaves it as it is")
    for name, tensor in orphans:
        shape = tuple(tensor.shape)
        alike = [other for other, parameter in missing.items() if tuple(parameter.shape) == shape]
        guess = f" (is it {alike[0]} before that was replaced?)" if len(alike) == 1 else ""
        message = (
            f"of shape {shape} is held by the optimizer and is not (any more) the model's{guess}: make the optimizer "
            "after the last change of the model"
        )
        yield Finding("optimizer", "error", name, message)


def check_ties(model: nn.Module) -> Iterator[Finding]:
    """Note tied names; find distinct parameters over one memory, and matrices that are equal copies."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    owners = first_names(parameters)
    for name, tensor in parameters.items():
        if owners[id(tensor)] != name:
            yield Finding("tie", "note", name, f"is one tensor with {owners[id(tensor)]}, counted once")
    placed: dict[tuple[object, ...], list[str]] = {}
    copies: dict[tuple[object, ...], list[str]] = {}
    for name, tensor in model.named_parameters():
        if tensor.numel() and not tensor.is_meta:
            placed.setdefault((tensor.device, tensor.data_ptr()), []).append(name)
            if tensor.ndim > 1:
                start = tuple(tensor.detach().flatten()[:8].tolist())  # so that few are compared in full
                copies.setdefault((tensor.shape, tensor.dtype, start), []).append(name)
    shared = [pair for names in placed.values() for pair in pairwise(names)]
    for name, other in shared:
        message = (
            f"is another nn.Parameter over {name}'s memory: the optimizer would step it twice; assign one to the other"
        )
        yield Finding("tie", "warning", other, message)
    for name, other in (pair for names in copies.values() for pair in pairwise(names)):
        if (name, other) not in shared and _is_copy(parameters[name], parameters[other]):
            yield Finding(
                "tie", "note", other, f"is an equal copy of {name}, not tied to it: two tensors that will part"
            )


def _is_copy(tensor: Tensor, other: Tensor) -> bool:
    constant = bool((tensor == tensor.flatten()[0]).all())  # zeros and ones are equal by design
    return not constant and torch.equal(tensor, other)


def check_contiguous(model: nn.Module) -> Iterator[Finding]:
    """Find parameters whose memory is not contiguous, in torch's order or in channels-last."""
    for name, parameter in model.named_parameters():
        formats = {4: [torch.channels_last], 5: [torch.channels_last_3d]}.get(parameter.ndim, [])
        if not any(parameter.is_contiguous(memory_format=form) for form in [torch.contiguous_format, *formats]):
            message = (
                f"is not contiguous (shape {tuple(parameter.shape)}, strides {parameter.stride()}), which safetensors "
                "refuses to save; store its .contiguous()"
            )
            yield Finding("contiguous", "error", name, message)


def check_finite(model: nn.Module) -> Iterator[Finding]:
    """Find NaN and Inf in parameters, and in buffers all but -Inf, which masks are made of."""
    tensors: list[tuple[str, Tensor, bool]] = [(name, tensor, False) for name, tensor in model.named_parameters()]
    tensors += [(name, tensor, True) for name, tensor in model.named_buffers()]
    for name, tensor, is_buffer in tensors:
        if tensor.is_meta or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        bad = ~torch.isfinite(tensor.detach())
        if is_buffer and not tensor.is_complex():
            bad &= ~torch.isneginf(tensor)
        count = int(bad.sum())
        if count:
            what = "NaN" if bool(torch.isnan(tensor.detach()).any()) else "Inf"
            yield Finding("finite", "error", name, f"holds {what}: {count} of {tensor.numel()} values are not finite")
