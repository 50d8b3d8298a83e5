"""Run one forward and backward pass on a copy of a model, to see which parameters it uses and what it does to them."""

import copy
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zoo.auditing.findings import Finding
from zoo.auditing.graph import iter_leaves
from zoo.auditing.snapshots import equal_bytes
from zoo.auditing.unregistered import LOST, iter_unregistered
from zoo.auditing.witness import Witness, share_memory
from zoo.errors import ZooError

Batch = Tensor | tuple[Any, ...] | Mapping[str, Any]

_REACHES_BACK = (
    "is read by the copy's forward, which was to read its own: a function that a module keeps is bound to the model "
    "(a closure over a module or its forward), so nothing was tried; make it a method, of a subclass or by "
    "types.MethodType"
)


def check_probe(model: nn.Module, batch: Batch) -> list[Finding]:
    """Find trainable parameters that forward does not use, that it replaces or writes to, and hidden ones that it uses.

    The model itself, its buffers, gradients, the batch and the random streams are left as they were.

    Args:
        model: The bare model.
        batch: Images, (B, 3, height, width), the tuple of forward's arguments or the mapping of its keywords, on the
            model's device.

    Raises:
        ZooError: If the copy cannot be made, or forward or backward fails on this batch.
    """
    with _kept_random_streams([*model.parameters(), *model.buffers(), *_tensors(batch)]), torch.enable_grad():
        probe, given = _copy(model), _clone(batch)
        before = dict(probe.named_parameters(remove_duplicate=False))
        hidden = _find_hidden(probe)
        witness = Witness(probe, [*before.values(), *probe.buffers(), *_tensors(given)])
        outputs, gradients = _run(probe, given, witness)
    originals = dict(model.named_parameters(remove_duplicate=False))
    back = set(map(id, originals.values())) & {id(leaf) for leaf in iter_leaves(outputs)}
    if back:
        names = [name for name, parameter in originals.items() if id(parameter) in back]
        return [Finding("probe", "warning", names[0], _REACHES_BACK)]
    after = dict(probe.named_parameters(remove_duplicate=False))
    findings = [
        *_check_forward(originals, before, after),
        *_check_hidden([*before.values(), *after.values(), *_tensors(given)], hidden, witness, outputs),
    ]
    if not gradients:
        message = "the outputs depend on no trainable parameter: does forward run under no_grad, or detach?"
        return [*findings, Finding("probe", "error", "", message)]
    for name, parameter in probe.named_parameters():
        if parameter.requires_grad and parameter.numel() and id(parameter) not in gradients:
            message = (
                "is trainable and gets no gradient: forward does not use it, and DDP would fail on it; use it "
                "(no_grad, detach and .data cut it off), freeze it, or remove it"
            )
            findings.append(Finding("probe", "error", name, message))
    return findings


def _copy(model: nn.Module) -> nn.Module:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):  # its copy computes with tensors that are not its parameters
            what = f"{name} is" if name else "this is"
            raise ZooError(f"the audit's probe cannot copy a ScriptModule, and {what} one: audit what it was made from")
    # deepcopy refuses tensors with a graph, as old weight_norm keeps: what is computed is handed over by value
    values: list[Any] = [value for module in model.modules() for value in vars(module).values()]
    values += [held.value for held in iter_unregistered(model)]
    memo = {id(value): value.detach().clone() for value in values if isinstance(value, Tensor) and not value.is_leaf}
    try:
        return copy.deepcopy(model, memo).train()  # parameters are copied without their gradients
    except Exception as error:
        raise ZooError(f"the audit's probe needs a copy of the model, which cannot be made: {error}") from error


def _find_hidden(probe: nn.Module) -> list[Tensor]:
    """Return the tensors that `check_registered` has named: in plain attributes, containers and hidden modules."""
    hidden = [held.value for held in iter_unregistered(probe)]
    inner = [tensor for value in hidden if isinstance(value, nn.Module) for tensor in _own(value)]
    return [*inner, *(value for value in hidden if isinstance(value, Tensor))]


def _own(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _run(probe: nn.Module, given: Batch, witness: Witness) -> tuple[list[Tensor], set[int]]:
    """Return the outputs that have a graph, and the ids of the probe's parameters that got a gradient."""
    try:
        with witness:
            outputs = [output for output in _tensors(_call(probe, given)) if output.requires_grad]
        with _kept_gradients(probe, outputs):
            if outputs:
                torch.autograd.backward([output.abs().sum() for output in outputs])
        reached = {id(parameter) for parameter in probe.parameters() if parameter.grad is not None}
        if witness.strange:  # what is kept outside is the same tensor in each pass, what is made on the way is not
            with witness.again():
                _call(probe, given)
    except Exception as error:
        shapes = [tuple(tensor.shape) for tensor in _tensors(given)]
        raise ZooError(f"the audit's probe failed on a batch of shape {shapes}: {error}") from error
    return outputs, reached


@contextmanager
def _kept_gradients(probe: nn.Module, outputs: list[Tensor]) -> Iterator[None]:
    """Give leaves that are not the probe's their gradients back: they may be the caller's own."""
    own = set(map(id, probe.parameters()))
    strangers = [(leaf, leaf.grad) for leaf in iter_leaves(outputs) if id(leaf) not in own]
    for leaf, _ in strangers:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in strangers:
            leaf.grad = gradient


def _call(probe: nn.Module, given: Batch) -> Any:
    if isinstance(given, Mapping):
        return probe(**given)
    return probe(*given) if isinstance(given, tuple) else probe(given)


def _check_forward(
    originals: Mapping[str, Tensor], before: Mapping[str, Tensor], after: Mapping[str, Tensor]
) -> Iterator[Finding]:
    """Find what forward did to the copy's parameters, whose values were those of the model's, the originals."""
    for name in dict.fromkeys([*before, *after]):
        if name not in after:
            message = "is removed by forward, so that the optimizer steps what is no parameter any more; keep it"
            yield Finding("probe", "error", name, message)
        elif after[name] is not before.get(name):
            missed = "the optimizer steps the old one" if name in before else "no optimizer made before knows it"
            message = f"is created anew in forward: {missed}; create it in __init__"
            yield Finding("probe", "error", name, message)
        elif not (after[name].is_meta or equal_bytes(after[name], originals[name])):
            message = (
                "is written to in forward: what the optimizer does to it is lost; write in place under torch.no_grad "
                "once, before training"
            )
            yield Finding("probe", "error", name, message)


def _check_hidden(
    parameters: Iterable[Tensor], hidden: list[Tensor], witness: Witness, outputs: list[Tensor]
) -> Iterator[Finding]:
    """Find what forward uses and the model does not hold; `hidden` is what `check_registered` names already."""
    told = set(map(id, [*parameters, *hidden]))
    leaves = [leaf for leaf in iter_leaves(outputs) if id(leaf) not in told]
    for leaf in leaves:
        place = witness.where_made(leaf)
        shape = tuple(leaf.shape)
        if place is not None:
            message = (
                f"its forward builds a tensor of shape {shape} that requires a gradient, anew in each pass: no "
                "optimizer ever steps it; create it once, as an nn.Parameter in __init__"
            )
            yield Finding("probe", "error", place, message)
        else:
            message = (
                f"its forward uses a tensor of shape {shape} that requires a gradient and is no parameter of the model "
                f"(kept in a closure, a global or an object): {LOST}; make it an nn.Parameter of the module"
            )
            yield Finding("probe", "error", witness.where_read(leaf), message)
    for tensor, place in witness.strange.values():
        floating = tensor.is_floating_point() or tensor.is_complex()
        if floating and tensor.ndim and not share_memory(tensor, [*leaves, *hidden]):  # a 0-dim one needs no moving
            message = (
                f"its forward uses a plain tensor of shape {tuple(tensor.shape)} that the model does not hold (kept in "
                f"a closure, a global or an object): {LOST}; register_buffer it, or make it an nn.Parameter"
            )
            yield Finding("probe", "warning", place, message)


def _tensors(outputs: Any) -> Iterator[Tensor]:
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        for value in outputs.values():
            yield from _tensors(value)
    elif isinstance(outputs, list | tuple):
        for value in outputs:
            yield from _tensors(value)
    elif is_dataclass(outputs):
        for field in fields(outputs):
            yield from _tensors(getattr(outputs, field.name))


def _clone(batch: Any) -> Any:
    """Copy a batch, so that a forward which writes to its arguments does not write to the caller's."""
    if isinstance(batch, Tensor):
        return batch.detach().clone().requires_grad_(batch.requires_grad)
    if isinstance(batch, Mapping):
        return {key: _clone(value) for key, value in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(map(_clone, batch))
    return batch


@contextmanager
def _kept_random_streams(tensors: Iterable[Tensor]) -> Iterator[None]:
    devices = {tensor.get_device() for tensor in tensors if tensor.is_cuda}
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=sorted(devices)):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
