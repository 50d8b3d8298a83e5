"""Prove that all ranks hold the same model, bit for bit, and name what differs where they do not.

Three lines in any Accelerate script, before `prepare` (DDP copies rank 0's weights over the evidence when it wraps):

    from train.replicas import check_replicas
    accelerator = Accelerator()
    print(check_replicas(model, accelerator))

DDP pairs tensors by position, so names, order, shapes, dtypes and requires_grad count as much as bytes. Bytes are
hashed, not compared as values: equal NaNs agree, +0 and -0 do not. The memory layout is left out.
"""

import json
import time
from dataclasses import asdict, dataclass
from typing import Literal

import torch
import xxhash
from accelerate import Accelerator
from torch import Tensor, nn

from train.errors import ReplicaMismatch
from train.mismatches import Row, Table, describe_mismatch
from train.ranks import gather_json, together
from zoo.auditing.snapshots import host_bytes

Buffers = Literal["all", "integral", "none"]


@dataclass(frozen=True)
class ReplicaReport:
    """What a passed check compared.

    Attributes:
        when: The moment of the check, as "before wrap".
        world_size: Ranks compared.
        tensors: Parameters and buffers on each rank, a tied tensor once for each of its names.
        bytes: Their size together on one rank, a tied tensor once.
        milliseconds: Wall time on this rank.
    """

    when: str
    world_size: int
    tensors: int
    bytes: int
    milliseconds: float

    def __str__(self) -> str:
        ranks = f"{self.world_size} ranks are equal" if self.world_size > 1 else "one rank, nothing to compare"
        return (
            f"replica check {self.when}: {ranks}, tensors={self.tensors} bytes={self.bytes} ms={self.milliseconds:.1f}"
        )


def check_replicas(
    model: nn.Module, accelerator: Accelerator, *, when: str = "before wrap", buffers: Buffers = "all"
) -> ReplicaReport:
    """Compare a model's parameters and buffers over all ranks; every rank calls it, and every rank raises alike.

    Args:
        model: The bare model, or what `accelerator.prepare` made of it: names are the bare model's in both cases.
        accelerator: The world to compare over.
        when: The moment, for the message.
        buffers: "all"; "integral" leaves out floating-point ones, whose running statistics differ by design once a
            step was taken; "none" compares parameters alone.

    Returns:
        What was compared. In a world of one there is nothing to compare, and nothing is hashed.

    Raises:
        ReplicaMismatch: If ranks differ; names tensors, ranks, and how they differ.
    """
    start = time.perf_counter()
    bare = accelerator.unwrap_model(model, keep_torch_compile=False)
    table: Table = []
    with together(accelerator, f"replica check {when}"):
        table = fingerprint(bare, buffers=buffers, hashed=accelerator.num_processes > 1)
    if accelerator.num_processes > 1:
        rows = [asdict(row) for row in table]
        digest = xxhash.xxh3_128_hexdigest(json.dumps(rows).encode())
        if len(set(map(str, gather_json(digest, accelerator)))) > 1:
            tables = [[Row(**row) for row in rank] for rank in gather_json(rows, accelerator)]  # type: ignore[union-attr, arg-type]
            raise ReplicaMismatch(describe_mismatch(tables, when=when))
    return ReplicaReport(
        when=when,
        world_size=accelerator.num_processes,
        tensors=len(table),
        bytes=sum(row.bytes for row in table if row.tied_to is None),
        milliseconds=1e3 * (time.perf_counter() - start),
    )


def fingerprint(model: nn.Module, *, buffers: Buffers = "all", hashed: bool = True) -> Table:
    """List a model's parameters and buffers in order of registration, each with a hash of its bytes.

    Args:
        model: A bare model. Tensors on an accelerator are copied to the host one at a time.
        buffers: Which buffers to list, as for `check_replicas`.
        hashed: Whether to read the bytes; without, every digest is "".

    Raises:
        ReplicaMismatch: If a tensor has no bytes to compare (it is on the meta device, or sparse).
    """
    first: dict[int, str] = {}
    table: Table = []
    for name, kind, tensor in _tensors(model, buffers):
        if tensor.is_meta or tensor.layout is not torch.strided:
            where = "on the meta device" if tensor.is_meta else f"of layout {tensor.layout}"
            raise ReplicaMismatch(f"{name} is {where}: it has no bytes to compare; give it values first")
        owner = first.setdefault(id(tensor), name)
        table.append(
            Row(
                name=name,
                kind=kind,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                requires_grad=tensor.requires_grad,
                tied_to=owner if owner != name else None,
                digest=_digest(tensor) if hashed and owner == name else "",
                bytes=tensor.numel() * tensor.element_size(),
            )
        )
    return table


def _tensors(model: nn.Module, buffers: Buffers) -> list[tuple[str, str, Tensor]]:
    found: list[tuple[str, str, Tensor]] = [
        (name, "parameter", tensor) for name, tensor in model.named_parameters(remove_duplicate=False)
    ]
    if buffers == "none":
        return found
    transient = {
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    return found + [
        (name, "non-persistent buffer" if name in transient else "persistent buffer", tensor)
        for name, tensor in model.named_buffers(remove_duplicate=False)
        if buffers == "all" or not (tensor.is_floating_point() or tensor.is_complex())
    ]


def _digest(tensor: Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(host_bytes(tensor))
