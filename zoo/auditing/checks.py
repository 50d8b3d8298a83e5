"""The checks that need a model and its optimizer alone, each for one way of not training as the owner believes."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from zoo.auditing.arguments import OptimizerLike
from zoo.auditing.findings import Finding
from zoo.auditing.snapshots import Snapshot, first_names, readable_values
from zoo.freezing import find_frozen, find_nothing_trainable

_STATISTICS = ("running_mean", "running_var")  # buffers that are never a mask or a bound


def check_materialized(model: nn.Module) -> Iterator[Finding]:
    """Find parameters and buffers of lazy modules, which have no shape before the first forward pass."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            message = "is a lazy module's and has no shape yet: run forward once, make the optimizer, audit again"
            yield Finding("materialized", "error", name, message)


def check_requires_grad(model: nn.Module) -> Iterator[Finding]:
    """Find parameters that nobody froze by name and that will not train; and a model with nothing to train."""
    nothing = find_nothing_trainable(model)
    if nothing:
        yield Finding("requires_grad", "error", "", nothing)
    named = find_frozen(model)
    for name, parameter in model.named_parameters():
        can_train = parameter.is_floating_point() or parameter.is_complex()
        if can_train and not parameter.requires_grad and name not in named:
            message = "requires_grad is off and no freeze pattern named it: zoo.freeze it by name, or zoo.unfreeze it"
            yield Finding("requires_grad", "error", name, message)
        elif parameter.requires_grad and name in named:
            message = (
                "was frozen by name and is trainable: was it replaced since, or switched on by hand? zoo.freeze it "
                "again, or zoo.unfreeze it"
            )
            yield Finding("requires_grad", "warning", name, message)


def check_optimizer(
    model: nn.Module, optimizers: Sequence[OptimizerLike], before: Snapshot | None = None
) -> Iterator[Finding]:
    """Find what the optimizers together miss, hold twice, or hold though it is not the model's."""
    names = first_names(dict(model.named_parameters(remove_duplicate=False)))
    places: dict[int, list[str]] = {}
    orphans: list[tuple[str, Tensor]] = []
    for group, place, tensor in _iter_held(optimizers):
        places.setdefault(id(tensor), []).append(group)
        if id(tensor) not in names:
            was = before.name_of(tensor) if before is not None else ""
            orphans.append((was or f"{group}, tensor {place}", tensor))
    missing = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in places
    }
    for name in missing:
        message = "is trainable and in no optimizer group: make the optimizer from the model as it is now, or freeze it"
        yield Finding("optimizer", "error", name, message)
    for name, parameter in model.named_parameters():
        yield from _check_places(name, parameter, places.get(id(parameter), []))
    for name, tensor in orphans:
        yield _name_orphan(name, tensor, missing)


def _iter_held(optimizers: Sequence[OptimizerLike]) -> Iterator[tuple[str, int, Tensor]]:
    """Yield each tensor that an optimizer holds: its group, as "optimizer 1's group 0", its place there, and it."""
    for number, optimizer in enumerate(optimizers):
        owner = f"optimizer {number}'s " if len(optimizers) > 1 else ""
        for index, group in enumerate(optimizer.param_groups):
            for place, tensor in enumerate(group["params"]):
                yield f"{owner}group {index}", place, tensor


def _check_places(name: str, parameter: nn.Parameter, groups: list[str]) -> Iterator[Finding]:
    if len(groups) > 1:
        message = f"is held {len(groups)} times, in {' and '.join(groups)}: each step would move it so often"
        yield Finding("optimizer", "error", name, message)
    if groups and not parameter.requires_grad:
        if parameter.grad is None:
            yield Finding("optimizer", "note", name, "is frozen and in the optimizer, which leaves it as it is")
            return
        message = (
            "is frozen, but holds a gradient from before, with which the optimizer's step moves it: set .grad to None "
            "(zero_grad(set_to_none=True)) when you freeze"
        )
        yield Finding("optimizer", "warning", name, message)


def _name_orphan(name: str, tensor: Tensor, missing: Mapping[str, Tensor]) -> Finding:
    shape = tuple(tensor.shape)
    alike = [other for other, parameter in missing.items() if tuple(parameter.shape) == shape]
    guess = f" (is it {alike[0]} before that was replaced?)" if len(alike) == 1 else ""
    message = (
        f"of shape {shape} is held by the optimizer and is not (any more) the model's{guess}: make the optimizer "
        "after the last change of the model"
    )
    return Finding("optimizer", "error", name, message)


def check_contiguous(model: nn.Module) -> Iterator[Finding]:
    """Find parameters whose memory is not contiguous, in torch's order or in channels-last."""
    for name, parameter in model.named_parameters():
        formats = {4: [torch.channels_last], 5: [torch.channels_last_3d]}.get(parameter.ndim, [])
        if parameter.layout is not torch.strided or any(
            parameter.is_contiguous(memory_format=form) for form in [torch.contiguous_format, *formats]
        ):
            continue
        place = f"shape {tuple(parameter.shape)}, strides {parameter.stride()}"
        if any(step == 0 for step, size in zip(parameter.stride(), parameter.shape, strict=True) if size > 1):
            message = (
                f"is expanded ({place}): its values share memory, so no step can move them apart; store a .clone()"
            )
        else:
            message = f"is not contiguous ({place}), which safetensors refuses to save; store its .contiguous()"
        yield Finding("contiguous", "error", name, message)


def check_finite(model: nn.Module) -> Iterator[Finding]:
    """Find NaN and Inf in parameters, and in buffers all but a mask's -Inf and a bound, which is Inf throughout."""
    tensors: list[tuple[str, Tensor, bool]] = [(name, tensor, False) for name, tensor in model.named_parameters()]
    tensors += [(name, tensor, not name.endswith(_STATISTICS)) for name, tensor in model.named_buffers()]
    for name, tensor, may_be_infinite in tensors:
        if tensor.is_meta or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        values = readable_values(tensor)
        if _is_finite(values):
            continue
        bad = ~torch.isfinite(values)
        if may_be_infinite and not values.is_complex():
            bad &= ~(torch.isneginf(values) | torch.isinf(values).all())
        count = int(bad.sum())
        if count:
            what = "NaN" if bool(torch.isnan(values).any()) else "Inf"
            message = (
                f"holds {what}: {count} of {tensor.numel()} values are not finite; draw it again, or load a checkpoint "
                "from before"
            )
            yield Finding("finite", "error", name, message)


def _is_finite(values: Tensor) -> bool:
    """Tell by the smallest and largest value, NaN where any is, in a tenth of the time that a look at each takes."""
    real = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    return not real.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(real))).all())
