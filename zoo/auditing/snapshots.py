"""A snapshot of a model and its optimizer, and a record of what training did to each parameter since."""

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import is_lazy

from zoo.auditing.arguments import Optimizers, check_model, list_optimizers
from zoo.errors import ZooError

_SAMPLE = 256  # values of a parameter, evenly spaced, that tell a fresh draw from a small correction


@dataclass(frozen=True)
class Rewrite:
    """A write to a parameter by something else than the optimizer's step.

    Attributes:
        after_step: The optimizer steps taken since the snapshot when it was written.
        likeness: Cosine between some of the values before and after, in [-1, 1]: near 1 for values that were clipped
            or rescaled, near 0 for values drawn anew; 0 where either is all zeros.
    """

    after_step: int
    likeness: float


class Trace:
    """One parameter as it was at the snapshot, and what reached it since.

    Attributes:
        tensor: The parameter itself.
        digest: Hash of its bytes at the snapshot.
        gradients: How many times a gradient arrived (one for each backward pass).
        largest: The largest absolute value of any gradient that arrived, 0-dim on the parameter's device, or None.
        learning_rate: The highest rate of an optimizer step since, None if no step's groups held it.
        rewrites: The writes between the optimizer's steps.
    """

    def __init__(self, tensor: nn.Parameter) -> None:
        self.tensor = tensor
        self.digest = hash_bytes(tensor)
        self.gradients = 0
        self.largest: Tensor | None = None
        self.learning_rate: float | None = None
        self.rewrites: list[Rewrite] = []
        self._version = _version(tensor)
        self._left = self.digest  # as the snapshot or the last step left it
        self._sample = self._take_sample()

    def note_gradient(self, tensor: Tensor) -> None:
        """Count a gradient that has just arrived; reads nothing back from the device."""
        self.gradients += 1
        if tensor.grad is not None:  # a hook of someone else's may have stepped and cleared it
            values = readable_values(tensor.grad)
            if values.numel():
                size = values.abs().amax()
                self.largest = size if self.largest is None else torch.maximum(self.largest, size)

    def note_rewrite(self, after_step: int) -> None:
        """Record a write, if there was one since the snapshot or the last step."""
        if hash_bytes(self.tensor) != self._left:
            sample = self._take_sample()
            same = sample.shape == self._sample.shape
            likeness = float(functional.cosine_similarity(sample, self._sample, dim=0)) if same else 0.0
            self.rewrites.append(Rewrite(after_step, likeness))

    def note_step(self) -> None:
        """Remember how an optimizer's step left the values."""
        self._left, self._sample = hash_bytes(self.tensor), self._take_sample()

    def _take_sample(self) -> Tensor:
        values = readable_values(self.tensor).flatten()
        values = torch.view_as_real(values).flatten() if values.is_complex() else values
        return values[:: max(1, values.numel() // _SAMPLE)].to(torch.float32, copy=True)

    @property
    def changed(self) -> bool:
        """Whether its bytes are other ones than at the snapshot."""
        return hash_bytes(self.tensor) != self.digest

    @property
    def written(self) -> bool:
        """Whether anything wrote to it since the snapshot, be it the same values again."""
        return _version(self.tensor) != self._version or self.changed

    @property
    def largest_gradient(self) -> float:
        """The largest absolute gradient so far, 0.0 if none arrived; waits for the device."""
        return 0.0 if self.largest is None else float(self.largest)


class Snapshot:
    """What a model was, and a recorder of gradients and steps until it is closed.

    Attributes:
        parameters: Every parameter by every name it had, ties included.
        traces: Those that were trainable, by their first name.
        frozen: Those that were not.
        steps: Optimizer steps since, of several optimizers those of the busiest; None without one that can tell.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizers | None) -> None:
        check_model(model, "the snapshot")
        optimizers = list_optimizers(optimizer, "the snapshot")
        model = bare_model(model)
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        for name, tensor in self.parameters.items():
            if tensor.is_meta or is_lazy(tensor):
                raise ZooError(
                    f"{name} has no values yet (a lazy module, or on meta): give it some, then take a snapshot"
                )
        self.traces = {name: Trace(tensor) for name, tensor in model.named_parameters() if tensor.requires_grad}
        self.frozen = {name: Trace(tensor) for name, tensor in model.named_parameters() if not tensor.requires_grad}
        self.steps: int | None = None
        self._handles = [
            trace.tensor.register_post_accumulate_grad_hook(trace.note_gradient)  # type: ignore[no-untyped-call]
            for trace in self.traces.values()
        ]
        self._counts: Counter[int] = Counter()
        for given in optimizers:
            inner = getattr(given, "optimizer", given)  # Accelerate's wrapper hands the step to this one
            if isinstance(inner, torch.optim.Optimizer):
                self.steps = 0
                self._handles.append(inner.register_step_pre_hook(self._before_step))
                self._handles.append(inner.register_step_post_hook(self._after_step))

    def _before_step(self, _optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        assert self.steps is not None
        for trace in self.traces.values():
            trace.note_rewrite(self.steps)

    def _after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self._counts[id(optimizer)] += 1
        self.steps = max(self._counts.values())
        for trace in self.traces.values():
            trace.note_step()
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
        if self._handles and self.steps:
            for trace in self.traces.values():
                trace.note_rewrite(self.steps)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def snapshot(model: nn.Module, optimizer: Optimizers | None = None) -> Snapshot:
    """Remember a model before some optimizer steps, and record them for `audit(model, optimizer, before=...)`.

    Until that audit, which ends the recording, each backward pass costs one reduction for each parameter, and each
    optimizer step two hashes of all of them (0.6 s for a ViT-B), to tell its writes from others': record a few steps.

    Args:
        model: The model, bare or wrapped.
        optimizer: The optimizer that steps it, bare or wrapped, or a list of several; without it, steps and rates are
            not known.

    Raises:
        ZooError: If the model is no module, or the optimizer none; or if a parameter has no values yet: a lazy
            module's, or one on the meta device.
    """
    return Snapshot(model, optimizer)


def bare_model(model: nn.Module) -> nn.Module:
    """Return the model inside DDP, DataParallel and torch.compile wrappers, whose names carry no prefix."""
    while True:
        compiled = dict(model.named_children()).get("_orig_mod")
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif compiled is not None:
            model = compiled
        else:
            return model


def readable_values(tensor: Tensor) -> Tensor:
    """Return a tensor's values, detached, as a strided tensor of a dtype that can be computed with."""
    values = tensor.detach()
    if values.layout is torch.sparse_coo:
        values = values.coalesce().values()
    elif values.layout is not torch.strided:
        values = values.values()
    return values.float() if values.is_floating_point() and values.element_size() == 1 else values


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def host_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes in the host's memory, row by row: equal NaNs agree there, +0 and -0 do not."""
    return _view_bytes(tensor).cpu().numpy().data


def hash_bytes(tensor: Tensor) -> str:
    """Hash a tensor's bytes; of a sparse one, those of the values that it holds."""
    return hashlib.blake2b(host_bytes(tensor), digest_size=16).hexdigest()


def equal_bytes(one: Tensor, other: Tensor) -> bool:
    """Say whether two tensors of one device have equal bytes; of sparse ones, whether their values have."""
    return torch.equal(_view_bytes(one), _view_bytes(other))


def _view_bytes(tensor: Tensor) -> Tensor:
    values = tensor.detach() if tensor.layout is torch.strided else readable_values(tensor)
    return values.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def first_names(parameters: Mapping[str, Tensor]) -> dict[int, str]:
    """Map each tensor's id to the first of its names."""
    names: dict[int, str] = {}
    for name, tensor in parameters.items():
        names.setdefault(id(tensor), name)
    return names
