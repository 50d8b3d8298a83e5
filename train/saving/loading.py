"""From a checkpoint to model and optimizer on all ranks: the main process reads, every rank checks, then all load."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from train.errors import CheckpointError
from train.ranks import gather_json, together
from zoo.files.ties import find_ties

Layout = Mapping[str, tuple[str, list[int]]]  # name -> dtype, as "float32", and shape


def fetch(path: Path, accelerator: Accelerator, check: Callable[[Layout], None]) -> dict[str, Tensor]:
    """Give every rank the tensors of a file that only the main process needs to see; all ranks together.

    Args:
        path: A safetensors file.
        accelerator: The world.
        check: Raises CheckpointError if such tensors do not fit this rank; called on all ranks before any is sent.

    Raises:
        CheckpointError: On every rank, if the file cannot be read, or does not fit one of them.
    """
    tensors = dict[str, Tensor]()
    layout: Layout = {}
    with together(accelerator, f"reading {path.name}"):
        if accelerator.is_main_process:
            tensors = read_tensors(path)
            layout = {name: describe(tensor) for name, tensor in tensors.items()}
    told = cast(dict[str, list[object]], gather_json(layout, accelerator)[0])
    layout = {name: (cast(str, dtype), cast(list[int], shape)) for name, (dtype, shape) in told.items()}
    with together(accelerator, f"resuming from {path.name}"):
        check(layout)
    return broadcast(tensors, layout, accelerator)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file.

    Raises:
        CheckpointError: If it cannot be read.
    """
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error


def describe(tensor: Tensor) -> tuple[str, list[int]]:
    """Return a tensor's dtype and shape, as they travel."""
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def broadcast(tensors: Mapping[str, Tensor], layout: Layout, accelerator: Accelerator) -> dict[str, Tensor]:
    """Return the main process's tensors on every rank, on its device, bit for bit; all ranks together.

    Args:
        tensors: What the main process holds; nobody looks at another rank's.
        layout: Name, dtype and shape of each, the same and in the same order on all ranks.
        accelerator: The world.
    """
    if accelerator.num_processes == 1:
        return dict(tensors)
    received = dict[str, Tensor]()
    for name, (dtype, shape) in layout.items():
        if accelerator.is_main_process:
            received[name] = tensors[name].to(accelerator.device).contiguous()
        else:
            received[name] = torch.empty(shape, dtype=getattr(torch, dtype), device=accelerator.device)
        if received[name].numel():
            torch.distributed.broadcast(received[name].view(-1).view(torch.uint8), src=0)  # gloo lacks some dtypes
    return received


def check_model(layout: Layout, path: Path, model: nn.Module) -> None:
    """Refuse weights that are not this model's.

    Raises:
        CheckpointError: Names the tensors that are missing, foreign, or of another shape or dtype.
    """
    weights = model.state_dict()
    ties = find_ties(weights)
    wanted = {name: describe(tensor) for name, tensor in weights.items() if name not in ties}
    faults = [f"{name} is missing" for name in wanted if name not in layout]
    faults += [f"{name} is not the model's" for name in layout if name not in wanted]
    faults += [
        f"{name} is {_phrase(layout[name])}, the model's is {_phrase(want)}"
        for name, want in wanted.items()
        if name in layout and layout[name] != want
    ]
    if faults:
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise CheckpointError(f"{path}: does not fit the model: {'; '.join(faults[:3])}{more}")


def check_optimizer(layout: Layout, path: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse optimizer state that is not of exactly the parameters that the optimizer holds.

    None at all is right: no step was taken yet.

    Raises:
        CheckpointError: Names the parameter.
    """
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    wanted = {name: list(parameter.shape) for name, parameter in model.named_parameters() if id(parameter) in held}
    saved = {key.rpartition("/")[0] for key in layout}
    for name in saved:
        if name not in wanted:
            raise CheckpointError(f"{path}: {name} is no parameter that the optimizer holds")
    for name in wanted if saved else ():
        if name not in saved:
            raise CheckpointError(f"{path}: holds no state of {name}")
    for key, (_, shape) in layout.items():
        name = key.rpartition("/")[0]
        if shape not in ([], wanted[name]):
            raise CheckpointError(f"{path}: {key} is of shape {shape}, {name} of {wanted[name]}")


def load_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load weights that were checked into a bare model, in place; a tied tensor is there under its first name."""
    ties = {name: tensors[kept] for name, kept in find_ties(model.state_dict()).items()}
    model.load_state_dict({**tensors, **ties}, strict=True)


def load_optimizer(model: nn.Module, optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Load optimizer state that was checked, in place, before the optimizer is wrapped."""
    parameters = dict(model.named_parameters())
    for key, tensor in tensors.items():
        name, _, slot = key.rpartition("/")
        optimizer.state[parameters[name]][slot] = tensor


def _phrase(layout: tuple[str, list[int]]) -> str:
    dtype, shape = layout
    return f"{dtype} {tuple(shape)}"
