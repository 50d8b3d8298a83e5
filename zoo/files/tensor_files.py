"""Tensors in safetensors files: read with every kind of damage named, written with ties kept. Never a pickle.

A tied tensor may stand in a file once, or under all its names; the metadata key `ties` says which names are one.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from zoo.errors import BundleError
from zoo.files.opening import read_file
from zoo.files.ties import find_ties


def read_tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read all tensors and the metadata of a safetensors file.

    Raises:
        BundleError: If the file is missing, not a regular file, truncated, or of another format.
    """
    return read_file(file, "pt")


def read_tied(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read all tensors of a file under all their names, and the ties among them.

    Returns:
        The tensors, a tied one the same object under each of its names; and {further name: first name}.

    Raises:
        BundleError: As `read_tensors`; also if the list of ties does not fit the tensors.
    """
    tensors, metadata = read_tensors(file)
    try:
        ties = json.loads(metadata.get("ties", "{}"))
        for name, kept in ties.items():
            if kept in ties or kept not in tensors:
                raise ValueError(f"{kept!r} is unknown")
            if name in tensors and not same_bits(tensors[name], tensors[kept]):
                raise ValueError(f"{name} and {kept} differ")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise BundleError(f"{file}: its list of tied tensors is damaged ({error})") from error
    return tensors | {name: tensors[kept] for name, kept in ties.items()}, ties


def write_tensors(file: Path, state: Mapping[str, Tensor], *, every_name: bool = False) -> dict[str, str]:
    """Write a state_dict as safetensors, with its ties in the metadata.

    Args:
        file: Where to.
        state: The state_dict, its tensors sharing storage as the model's own do.
        every_name: Whether a tied tensor is written under each of its names, for readers that know no ties.

    Returns:
        The ties, {further name: first name}.

    Raises:
        ValueError: If two tensors overlap without being the same.
        SafetensorError, OSError: If the disk refuses.
    """
    ties = find_ties(state)
    kept = {name: tensor for name, tensor in state.items() if every_name or name not in ties}
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in kept.items()}
    save_file(copies, file, metadata={"ties": json.dumps(ties)})
    return ties


def check_finite(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise BundleError, naming the first tensors, if any holds NaN or Inf."""
    wrong = [name for name, t in tensors.items() if t.is_floating_point() and not t.isfinite().all()]
    if wrong:
        raise BundleError(f"{file}: {list_names(wrong)} {'holds' if len(wrong) == 1 else 'hold'} NaN or Inf")


def find_misfits(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], *, exact: bool = True) -> list[str]:
    """Say of every tensor that is missing, unknown, or of another shape or dtype, what was got and what is wanted.

    Args:
        got: The tensors of a file.
        wanted: The state_dict that they are for; it may be on the meta device.
        exact: Whether floats of another width are a misfit too.
    """
    faults = [f"{name} is missing" for name in wanted if name not in got]
    faults += [f"{name} is not the model's" for name in got if name not in wanted]
    for name in wanted.keys() & got.keys():
        have, want = got[name], wanted[name]
        alike = have.dtype == want.dtype or (not exact and have.is_floating_point() and want.is_floating_point())
        if have.shape != want.shape or not alike:
            faults.append(f"{name}: got {_describe(have)}, wanted {_describe(want)}")
    return sorted(faults)


def list_names(names: Iterable[str], most: int = 5, separator: str = ", ") -> str:
    """Join names for one line, the first few and a count of the rest."""
    listed = list(names)
    more = f"{separator.rstrip()} and {len(listed) - most} more" if len(listed) > most else ""
    return separator.join(listed[:most]) + more


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Say whether two tensors are the same to the last bit, NaN for NaN and -0 for -0."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right)))


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
