"""A snapshot of a model and its optimizer, and a record of what training did to each parameter since."""

import hashlib
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class OptimizerLike(Protocol):
    """What the audit reads of an optimizer: torch's own, and Accelerate's wrapper of one."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups, each with "params" and "lr"."""
        ...


class Trace:
    """One parameter that was trainable at the snapshot, and what reached it since.

    Attributes:
        tensor: The parameter itself.
        digest: Hash of its bytes at the snapshot.
        gradients: How many times a gradient arrived (one for each backward pass).
        largest: The largest absolute value of any gradient that arrived, 0-dim on the parameter's device, or None.
        learning_rate: The highest rate of an optimizer step since, None if no step's groups held it.
    """

    def __init__(self, tensor: nn.Parameter) -> None:
        self.tensor = tensor
        self.digest = hash_bytes(tensor)
        self.gradients = 0
        self.largest: Tensor | None = None
        self.learning_rate: float | None = None

    def note_gradient(self, tensor: Tensor) -> None:
        """Count a gradient that has just arrived; reads nothing back from the device."""
        self.gradients += 1
        if tensor.grad is not None and tensor.grad.numel():
            size = tensor.grad.detach().abs().amax()
            self.largest = size if self.largest is None else torch.maximum(self.largest, size)

    @property
    def largest_gradient(self) -> float:
        """The largest absolute gradient so far, 0.0 if none arrived; waits for the device."""
        return 0.0 if self.largest is None else float(self.largest)


class Snapshot:
    """What a model was, and a recorder of gradients and steps until it is closed.

    Attributes:
        parameters: Every parameter by every name it had, ties included.
        traces: Those that were trainable, by their first name.
        steps: Optimizer steps since, or None without an optimizer that can tell.
    """

    def __init__(self, model: nn.Module, optimizer: OptimizerLike | None) -> None:
        model = bare_model(model)
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.traces = {name: Trace(tensor) for name, tensor in model.named_parameters() if tensor.requires_grad}
        self.steps: int | None = None
        self._handles = [
            trace.tensor.register_post_accumulate_grad_hook(trace.note_gradient)  # type: ignore[no-untyped-call]
            for trace in self.traces.values()
        ]
        inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper hands the step to this one
        if isinstance(inner, torch.optim.Optimizer):
            self.steps = 0
            self._handles.append(inner.register_step_post_hook(self._note_step))

    def _note_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        assert self.steps is not None
        self.steps += 1
        traces = {id(trace.tensor): trace for trace in self.traces.values()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in traces:
                    trace = traces[id(parameter)]
                    trace.learning_rate = max(trace.learning_rate or 0.0, float(group.get("lr", 1.0)))

    def name_of(self, tensor: Tensor) -> str:
        """Return the name a tensor had, or "" if it was none of the model's parameters."""
        return next((name for name, parameter in self.parameters.items() if parameter is tensor), "")

    def close(self) -> None:
        """Stop recording; what was recorded stays. Closing twice does no harm."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def snapshot(model: nn.Module, optimizer: OptimizerLike | None = None) -> Snapshot:
    """Remember a model before some optimizer steps, and record them for `audit(model, optimizer, before=...)`.

    Until that audit, which ends the recording, each backward pass costs one reduction for each parameter.

    Args:
        model: The model, bare or wrapped.
        optimizer: The optimizer that steps it, bare or wrapped; without it, steps and rates are not known.
    """
    return Snapshot(model, optimizer)


def bare_model(model: nn.Module) -> nn.Module:
    """Return the model inside DDP, DataParallel and torch.compile wrappers, whose names carry no prefix."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(vars(model)["_modules"].get("_orig_mod"), nn.Module):
            model = vars(model)["_modules"]["_orig_mod"]
        else:
            return model


def host_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes in the host's memory, row by row: equal NaNs agree there, +0 and -0 do not."""
    host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return host.reshape(-1).view(torch.uint8).numpy().data


def hash_bytes(tensor: Tensor) -> str:
    """Hash a tensor's bytes."""
    return hashlib.blake2b(host_bytes(tensor), digest_size=16).hexdigest()


def first_names(parameters: Mapping[str, Tensor]) -> dict[int, str]:
    """Map each tensor's id to the first of its names."""
    names: dict[int, str] = {}
    for name, tensor in parameters.items():
        names.setdefault(id(tensor), name)
    return names
