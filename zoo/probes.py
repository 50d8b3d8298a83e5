"""Run one forward and backward pass on a copy of a model, to see which parameters it uses and what it does to them."""

import copy
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zoo.errors import ZooError
from zoo.findings import Finding
from zoo.snapshots import hash_bytes

Batch = Tensor | tuple[Any, ...]


def check_probe(model: nn.Module, batch: Batch) -> list[Finding]:
    """Find trainable parameters that forward does not use, and parameters that forward replaces or writes to.

    The model itself, its buffers, gradients and the random streams are left as they were.

    Args:
        model: The bare model.
        batch: Images, (B, 3, height, width), or the tuple of forward's arguments, on the model's device.

    Raises:
        ZooError: If the copy cannot be made, or forward or backward fails on this batch.
    """
    arguments = batch if isinstance(batch, tuple) else (batch,)
    with _kept_random_streams(model), torch.enable_grad():
        try:
            return _run(copy.deepcopy(model).train(), arguments)
        except (RuntimeError, TypeError, ValueError, AssertionError, IndexError) as error:
            shapes = [tuple(argument.shape) for argument in arguments if isinstance(argument, Tensor)]
            raise ZooError(f"the audit's probe failed on a batch of shape {shapes}: {error}") from error


def _run(probe: nn.Module, arguments: tuple[Any, ...]) -> list[Finding]:
    probe.zero_grad(set_to_none=True)
    before = dict(probe.named_parameters())
    hashes = {name: hash_bytes(parameter) for name, parameter in before.items()}
    outputs = [output for output in _tensors(probe(*arguments)) if output.requires_grad]
    after = dict(probe.named_parameters())
    findings = list(_check_forward(before, after, hashes))
    if not outputs:
        message = "the outputs depend on no trainable parameter: does forward run under no_grad, or detach?"
        return [*findings, Finding("probe", "error", "", message)]
    torch.autograd.backward([output.abs().sum() for output in outputs])
    for name, parameter in after.items():
        if parameter.requires_grad and parameter.grad is None and parameter.numel():
            message = (
                "is trainable and gets no gradient: forward does not use it, and DDP would fail on it; use it, freeze "
                "it, or remove it"
            )
            findings.append(Finding("probe", "error", name, message))
    return findings


def _check_forward(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], hashes: Mapping[str, str]
) -> Iterator[Finding]:
    for name in dict.fromkeys([*before, *after]):
        if after.get(name) is not before.get(name):
            message = "is created anew in forward: the optimizer steps the old one; create it in __init__"
            yield Finding("probe", "error", name, message)
        elif hash_bytes(after[name]) != hashes[name]:
            yield Finding("probe", "error", name, "is written to in forward: what the optimizer does to it is lost")


def _tensors(outputs: Any) -> Iterator[Tensor]:
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        for value in outputs.values():
            yield from _tensors(value)
    elif isinstance(outputs, list | tuple):
        for value in outputs:
            yield from _tensors(value)


@contextmanager
def _kept_random_streams(model: nn.Module) -> Iterator[None]:
    devices = {tensor.get_device() for tensor in model.parameters() if tensor.is_cuda}
    python = random.getstate()
    try:
        with torch.random.fork_rng(devices=sorted(devices)):
            yield
    finally:
        random.setstate(python)
