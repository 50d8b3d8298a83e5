"""Put into words how the ranks' tables of tensors differ: which tensor, which ranks, in what."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

_MOST = 8  # tensors named in a message; the rest are counted


@dataclass(frozen=True)
class Row:
    """One name in a model's table of tensors.

    Attributes:
        name: The parameter's or buffer's name in the bare model.
        kind: "parameter", "persistent buffer" or "non-persistent buffer".
        shape: Its shape.
        dtype: Its dtype, as "float32".
        requires_grad: Whether it is to be trained.
        tied_to: The first name that holds the very same tensor, or None if this is the first.
        digest: Hexadecimal hash of its bytes, "" if tied.
        bytes: Its size.
    """

    name: str
    kind: str
    shape: Sequence[int]
    dtype: str
    requires_grad: bool
    tied_to: str | None
    digest: str
    bytes: int


Table: TypeAlias = list[Row]


def describe_mismatch(tables: Sequence[Table], *, when: str = "before wrap") -> str:
    """Describe how tables differ: a first line with counts and the odd ranks, a line for each tensor, the way out.

    Args:
        tables: Each rank's table, in rank order; at least two of them differ.
        when: The moment of the check.
    """
    ranks = [{row.name: row for row in table} for table in tables]
    names = list(dict.fromkeys(name for table in tables for name in (row.name for row in table)))
    lines = {name: line for name in names if (line := _describe_tensor(name, ranks))}
    groups = _group({rank: tuple(map(_key, table)) for rank, table in enumerate(tables)})
    shown = [f"{name}: {line}" for name, line in list(lines.items())[:_MOST]]
    if len(lines) > _MOST:
        shown.append(f"... and {len(lines) - _MOST} more")
    order = _describe_order([list(rank) for rank in ranks])
    odd = [rank for _, members in groups[1:] for rank in members]
    return "\n  ".join(
        [
            f"replica check {when}: {_ranks(odd)} of {len(tables)} {_differ(odd)} from {_ranks(groups[0][1])}, "
            f"{len(lines)} of {len(names)} tensors differ",
            *([order] if order else []),
            *shown,
            "way out: build the model from the same code, settings and seed on every rank (a seed of each rank's own "
            "belongs after the build), or load the same checkpoint on all",
        ]
    )


def _describe_tensor(name: str, ranks: Sequence[Mapping[str, Row]]) -> str:
    """Return in what one tensor differs, or "" if it does not."""
    rows = {rank: table.get(name) for rank, table in enumerate(ranks)}
    held = {rank: row for rank, row in rows.items() if row is not None}
    missing = [rank for rank, row in rows.items() if row is None]
    parts = [f"missing on {_ranks(missing)}, there on {_ranks(list(held))}"] if missing else []
    fields = {
        "kind": {rank: row.kind for rank, row in held.items()},
        "shape": {rank: str(tuple(row.shape)) for rank, row in held.items()},
        "dtype": {rank: row.dtype for rank, row in held.items()},
        "requires_grad": {rank: str(row.requires_grad) for rank, row in held.items()},
        "tie": {rank: f"the same tensor as {row.tied_to}" if row.tied_to else "its own" for rank, row in held.items()},
    }
    for field, values in fields.items():
        groups = _group(values)
        if len(groups) > 1:
            parts.append(f"{field} is " + ", ".join(f"{value} on {_ranks(members)}" for value, members in groups))
    if not parts:
        digests = _group({rank: row.digest for rank, row in held.items()})
        if len(digests) > 1:
            parts.append(_describe_bytes(name, digests, ranks))
    return "; ".join(parts)


def _describe_bytes(
    name: str, digests: Sequence[tuple[Hashable, list[int]]], ranks: Sequence[Mapping[str, Row]]
) -> str:
    """Say which ranks' bytes differ and, where they are another tensor's of the reference rank, whose they are."""
    reference = ranks[digests[0][1][0]]
    parts = ["bytes differ: " + ", ".join(f"{str(digest)[:8]} on {_ranks(who)}" for digest, who in digests)]
    for digest, members in digests[1:]:
        owners = [other for other, row in reference.items() if row.digest == digest and other != name]
        if len(owners) == 1:  # two owners (biases of zeros) would prove nothing
            theirs = ranks[members[0]].get(owners[0])
            swapped = theirs is not None and theirs.digest == reference[name].digest
            parts.append(
                f"swapped with {owners[0]} on {_ranks(members)}"
                if swapped
                else f"{_ranks(members)} {_hold(members)} here what {_ranks(digests[0][1])} {_hold(digests[0][1])} at "
                f"{owners[0]}"
            )
    return "; ".join(parts)


def _describe_order(names: Sequence[list[str]]) -> str:
    """Say where the order of registration first differs; "" if it does not, or if the names themselves do."""
    if any(set(other) != set(names[0]) for other in names):
        return ""
    groups = _group({rank: tuple(order) for rank, order in enumerate(names)})
    if len(groups) == 1:
        return ""
    reference, odd = names[groups[0][1][0]], names[groups[1][1][0]]
    place = next(i for i, pair in enumerate(zip(reference, odd, strict=True)) if pair[0] != pair[1])
    return (
        f"order of registration differs (DDP pairs by position): place {place} is {reference[place]} on "
        f"{_ranks(groups[0][1])}, {odd[place]} on {_ranks(groups[1][1])}"
    )


def _key(row: Row) -> Hashable:
    return (row.name, row.kind, tuple(row.shape), row.dtype, row.requires_grad, row.tied_to, row.digest)


def _group(values: Mapping[int, Hashable]) -> list[tuple[Hashable, list[int]]]:
    """Group ranks by value, the largest group first, among equals the one with the lowest rank."""
    groups: dict[Hashable, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return sorted(groups.items(), key=lambda group: (-len(group[1]), group[1][0]))


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _differ(ranks: Sequence[int]) -> str:
    return "differ" if len(ranks) > 1 else "differs"


def _hold(ranks: Sequence[int]) -> str:
    return "hold" if len(ranks) > 1 else "holds"
