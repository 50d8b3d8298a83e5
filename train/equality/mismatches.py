"""Put into words how the ranks' tables of tensors differ: which tensor, which ranks, in what."""

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from train.equality.phrases import group_ranks, name_ranks, say_values

_MOST = 8  # of the model's tensors named in a message; the rest are counted
_MOST_OF_OPTIMIZER = 4  # beside them
BUILD_ALIKE = (
    "way out: build the model from the same code, settings and seed on every rank (a seed of each rank's own "
    "belongs after the build), or load the same checkpoint on all"
)


@dataclass(frozen=True)
class Row:
    """One name in a model's table of tensors.

    Attributes:
        name: The parameter's or buffer's name in the bare model.
        kind: "parameter", "persistent buffer", "non-persistent buffer", "running statistic", "optimizer state" or
            "optimizer setting".
        shape: Its shape.
        dtype: Its dtype, as "float32".
        requires_grad: Whether it is to be trained.
        tied_to: The first name that holds the very same tensor, or None if this is the first.
        digest: Hexadecimal hash of its bytes, "" if tied.
        bytes: Its size.
        value: What it says, where it is one number or text of the optimizer's; else "".
    """

    name: str
    kind: str
    shape: Sequence[int]
    dtype: str
    requires_grad: bool
    tied_to: str | None
    digest: str
    bytes: int
    value: str = ""


Table: TypeAlias = list[Row]


def find_differing(tables: Sequence[Table]) -> dict[str, str]:
    """Map the name of each tensor that differs to in what it does, in order of registration.

    Args:
        tables: Each rank's table, in rank order.
    """
    ranks = [{row.name: row for row in table} for table in tables]
    names = dict.fromkeys(row.name for table in tables for row in table)
    return {name: line for name in names if (line := _describe_tensor(name, ranks))}


def choose_named(differing: Collection[str], tables: Sequence[Table]) -> list[str]:
    """Return the names that a message has room for: the first of the model's and, beside them, of the optimizer's."""
    own = {row.name for table in tables for row in table if not row.kind.startswith("optimizer")}
    model = [name for name in differing if name in own]
    return model[:_MOST] + [name for name in differing if name not in own][:_MOST_OF_OPTIMIZER]


def describe_mismatch(
    tables: Sequence[Table],
    *,
    when: str = "before wrap",
    gaps: Mapping[str, str] | None = None,
    causes: Sequence[str] = (BUILD_ALIKE,),
) -> str:
    """Describe how tables differ: a first line with counts and the odd ranks, a line for each tensor, the way out.

    Args:
        tables: Each rank's table, in rank order; at least two of them differ.
        when: The moment of the check.
        gaps: How far apart the values of a named tensor are, where it is known.
        causes: The last lines: what the likely cause is, and the way out.
    """
    ranks = [{row.name: row for row in table} for table in tables]
    differing = find_differing(tables)
    groups = group_ranks({rank: tuple(map(_key, table)) for rank, table in enumerate(tables)})
    named = choose_named(differing, tables)
    shown = ["; ".join(filter(None, (f"{name}: {differing[name]}", (gaps or {}).get(name)))) for name in named]
    if len(differing) > len(named):
        shown.append(f"... and {len(differing) - len(named)} more")
    order = _describe_order([list(rank) for rank in ranks])
    odd = [rank for _, members in groups[1:] for rank in members]
    total = len({name for rank in ranks for name in rank})
    return "\n  ".join(
        [
            f"replica check {when}: {name_ranks(odd)} of {len(tables)} {_differ(odd)} from "
            f"{name_ranks(groups[0][1])}, {len(differing)} of {total} tensors differ",
            *([order] if order else []),
            *shown,
            *causes,
        ]
    )


def _describe_tensor(name: str, ranks: Sequence[Mapping[str, Row]]) -> str:
    """Return in what one tensor differs, or "" if it does not."""
    rows = {rank: table.get(name) for rank, table in enumerate(ranks)}
    held = {rank: row for rank, row in rows.items() if row is not None}
    missing = [rank for rank, row in rows.items() if row is None]
    parts = [f"missing on {name_ranks(missing)}, there on {name_ranks(list(held))}"] if missing else []
    fields = {
        "kind": {rank: row.kind for rank, row in held.items()},
        "shape": {rank: str(tuple(row.shape)) for rank, row in held.items()},
        "dtype": {rank: row.dtype for rank, row in held.items()},
        "requires_grad": {rank: str(row.requires_grad) for rank, row in held.items()},
        "tie": {rank: f"the same tensor as {row.tied_to}" if row.tied_to else "its own" for rank, row in held.items()},
        "value": {rank: row.value for rank, row in held.items()},
    }
    for field, values in fields.items():
        if len(group_ranks(values)) > 1:
            parts.append(f"{field} is {say_values(values)}")
    if not parts:
        digests = group_ranks({rank: row.digest for rank, row in held.items()})
        if len(digests) > 1:
            parts.append(_describe_bytes(name, digests, ranks))
    return "; ".join(parts)


def _describe_bytes(
    name: str, digests: Sequence[tuple[Hashable, list[int]]], ranks: Sequence[Mapping[str, Row]]
) -> str:
    """Say which ranks' bytes differ and, where they are another tensor's of the reference rank, whose they are."""
    reference = ranks[digests[0][1][0]]
    parts = ["bytes differ: " + ", ".join(f"{str(digest)[:8]} on {name_ranks(who)}" for digest, who in digests)]
    for digest, members in digests[1:]:
        owners = [other for other, row in reference.items() if row.digest == digest and other != name]
        if len(owners) == 1:  # two owners (biases of zeros) would prove nothing
            theirs = ranks[members[0]].get(owners[0])
            swapped = theirs is not None and theirs.digest == reference[name].digest
            parts.append(
                f"swapped with {owners[0]} on {name_ranks(members)}"
                if swapped
                else f"{name_ranks(members)} {_hold(members)} here what {name_ranks(digests[0][1])} "
                f"{_hold(digests[0][1])} at {owners[0]}"
            )
    return "; ".join(parts)


def _describe_order(names: Sequence[list[str]]) -> str:
    """Say where the order of registration first differs; "" if it does not, or if the names themselves do."""
    if any(set(other) != set(names[0]) for other in names):
        return ""
    groups = group_ranks({rank: tuple(order) for rank, order in enumerate(names)})
    if len(groups) == 1:
        return ""
    reference, odd = names[groups[0][1][0]], names[groups[1][1][0]]
    place = next(i for i, pair in enumerate(zip(reference, odd, strict=True)) if pair[0] != pair[1])
    return (
        f"order of registration differs (DDP pairs by position): place {place} is {reference[place]} on "
        f"{name_ranks(groups[0][1])}, {odd[place]} on {name_ranks(groups[1][1])}"
    )


def _key(row: Row) -> Hashable:
    return (row.name, row.kind, tuple(row.shape), row.dtype, row.requires_grad, row.tied_to, row.digest, row.value)


def _differ(ranks: Sequence[int]) -> str:
    return "differ" if len(ranks) > 1 else "differs"


def _hold(ranks: Sequence[int]) -> str:
    return "hold" if len(ranks) > 1 else "holds"
