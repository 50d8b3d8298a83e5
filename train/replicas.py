"""Prove that all ranks hold the same model, bit for bit, and name what differs where they do not.

Three lines in any Accelerate script, before `prepare` (DDP copies rank 0's weights over the evidence when it wraps):

    from train.replicas import check_replicas
    accelerator = Accelerator()
    print(check_replicas(model, accelerator))

DDP pairs tensors by position, so names, order, shapes, dtypes and requires_grad count as much as bytes. Bytes are
hashed, not compared as values: equal NaNs agree, +0 and -0 do not. The memory layout is left out.
"""

import os
import time
from dataclasses import asdict, dataclass
from typing import cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from train.equality.causes import find_causes, find_managed
from train.equality.differences import measure
from train.equality.digests import made_alike, raise_alike
from train.equality.inventory import Buffers, Item, digest_items, list_items, tabulate
from train.equality.mismatches import Row, Table, choose_named, describe_mismatch, find_differing
from train.errors import ReplicaMismatch
from train.ranks import check_world, gather_json, together
from zoo.auditing.snapshots import bare_model


@dataclass(frozen=True)
class ReplicaReport:
    """What a passed check compared.

    Attributes:
        when: The moment of the check, as "before wrap".
        world_size: Ranks compared.
        tensors: Tensors on each rank, those of the optimizer's states too; a tied one once for each of its names.
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
    model: nn.Module,
    accelerator: Accelerator,
    *,
    when: str = "before wrap",
    buffers: Buffers = "all",
    optimizer: Optimizer | None = None,
) -> ReplicaReport:
    """Compare a model's parameters and buffers over all ranks; every rank calls it, and every rank raises alike.

    Where all is equal it reads each byte once and gathers one short row. Only where it is not, tables and the values
    of a few tensors travel.

    Args:
        model: The bare model, or what `accelerator.prepare` made of it: names are the bare model's in both cases.
        accelerator: The world to compare over.
        when: The moment, for the message.
        buffers: "all". "drift", once steps were taken: running statistics, which each rank gathers from its own
            images, are first given rank 0's, in place, as DDP's next forward does; all others are compared as they are.
            "integral" leaves out floating-point ones; "none" compares parameters alone.
        optimizer: The optimizer, bare or prepared, whose states and settings are to be compared too; not one that
            shards its state over the ranks.

    Returns:
        What was compared. In a world of one there is nothing to compare, and nothing is hashed.

    Raises:
        ReplicaMismatch: If ranks differ; names tensors, ranks, how far apart they are, and the likely cause.
        WorldSizeError: If this process believes that it is alone, but was launched as one of several.
    """
    start = time.perf_counter()
    bare = bare_model(model)
    items: list[Item] = []

    def make() -> bytes:
        items.extend(list_items(bare, buffers=buffers, optimizer=optimizer))
        return digest_items(items) if accelerator.num_processes > 1 else b""

    what = f"replica check {when}"
    if accelerator.num_processes == 1:
        check_world(accelerator, os.environ)
        make()
    elif not made_alike(make, accelerator, what):
        raise_alike(ReplicaMismatch(explain(model, items, accelerator, when=when)), accelerator, what)
    elif statistics := [item for item in items if item.kind == "running statistic"]:
        share_statistics([cast(Tensor, item.tensor) for item in statistics])
        plain = [Item(item.name, "persistent buffer", item.tensor) for item in statistics]
        if not made_alike(lambda: digest_items(plain), accelerator, what):
            message = explain(model, plain, accelerator, when=f"{when}, after the broadcast")
            raise_alike(ReplicaMismatch(message), accelerator, what)
    return ReplicaReport(
        when=when,
        world_size=accelerator.num_processes,
        tensors=sum(item.tensor is not None for item in items),
        bytes=sum(item.tensor.nbytes for item in items if item.tensor is not None and item.tied_to is None),
        milliseconds=1e3 * (time.perf_counter() - start),
    )


def explain(model: nn.Module, items: list[Item], accelerator: Accelerator, *, when: str) -> str:
    """Gather what ranks hold, and say how it differs, by how much and why; every rank calls it and says the same."""
    mine: dict[str, list[dict[str, object]] | list[str] | None] = {}
    with together(accelerator, f"replica check {when}"):
        mine = {"rows": [asdict(row) for row in tabulate(items)], "managed": find_managed(model)}
    told = [cast("dict[str, list[dict[str, object]]]", rank) for rank in gather_json(mine, accelerator)]  # type: ignore[arg-type]
    tables = [[Row(**row) for row in rank["rows"]] for rank in told]  # type: ignore[arg-type]
    differing = find_differing(tables)
    named = choose_named(differing, tables)
    tensors = {item.name: item.tensor for item in items if item.tensor is not None and item.tensor.numel() > 0}
    gaps = measure({name: tensors[name] for name in named if _only_bytes_differ(name, tables)}, accelerator)
    odd = {name: gap.odd for name, gap in gaps.items() if gap.odd}
    causes = find_causes(tables, differing, cast("list[str] | None", told[0]["managed"]), odd)
    return describe_mismatch(tables, when=when, gaps={name: str(gap) for name, gap in gaps.items()}, causes=causes)


def share_statistics(statistics: list[Tensor]) -> None:
    """Give every rank rank 0's values, in place; one broadcast for each dtype. Every rank calls it alike."""
    for dtype in sorted({tensor.dtype for tensor in statistics}, key=str):
        alike = [tensor for tensor in statistics if tensor.dtype == dtype]
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in alike])
        torch.distributed.broadcast(flat, src=0)
        with torch.no_grad():
            for tensor, values in zip(alike, torch.split(flat, [tensor.numel() for tensor in alike]), strict=True):
                tensor.copy_(values.view_as(tensor))


def _only_bytes_differ(name: str, tables: list[Table]) -> bool:
    rows = [next((row for row in table if row.name == name), None) for table in tables]
    if not all(row is not None and row.digest for row in rows):  # missing, tied, or a plain number
        return False
    shapes = {(tuple(row.shape), row.dtype) for row in rows if row is not None}
    return len(shapes) == 1 and len({row.digest for row in rows if row is not None}) > 1
