"""The likely cause of a difference between replicas, read off its pattern, and the way out."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from train.equality.mismatches import BUILD_ALIKE, Row, Table
from train.equality.phrases import group_ranks, name_ranks

_MOST = 0.5  # the rest may be equal by chance: AdamW's first step follows the gradient's sign alone


@dataclass(frozen=True)
class Pattern:
    """What differs, sorted by what it is; names in order of registration.

    Attributes:
        trainable: Names of all trainable parameters.
        parted: Those of them that differ, or of which the optimizer holds what differs.
        written: Those of them that differ though the optimizer holds the same of them.
        unmanaged: Trainable parameters that DDP has never heard of; None without a DDP wrapper.
        frozen: Frozen parameters that differ.
        buffers: Buffers that differ.
        states: The optimizer's states that differ.
        settings: The optimizer's settings that differ, as "optimizer: group 0 / lr".
        steps: Optimizer steps that each rank has taken, where the optimizer counts them.
    """

    trainable: Sequence[str]
    parted: Sequence[str]
    written: Sequence[str]
    unmanaged: Sequence[str] | None
    frozen: Sequence[str]
    buffers: Sequence[str]
    states: Sequence[str]
    settings: Sequence[str]
    steps: Sequence[float]


def find_managed(model: nn.Module) -> list[str] | None:
    """Return the names of the parameters whose gradients DDP averages, as the bare model calls them.

    They were settled at the wrap. DDP itself is asked, and makes a gradient's worth of zeros to answer.

    Args:
        model: What `prepare` returned, or anything else: None without a DDP wrapper, or where DDP does not tell.
    """
    while not isinstance(model, DistributedDataParallel):
        inner = dict(model.named_children()).get("_orig_mod")  # torch.compile's
        if inner is None:
            return None
        model = inner
    ask = getattr(model.reducer, "_get_zeros_like_grad_buckets", None)
    if ask is None:
        return None
    managed = {id(tensor) for bucket in ask() for tensor in bucket.parameters()}
    return [name for name, tensor in model.module.named_parameters(remove_duplicate=False) if id(tensor) in managed]


def find_causes(
    tables: Sequence[Table],
    differing: Collection[str],
    managed: Collection[str] | None,
    non_finite: Mapping[str, Sequence[int]] | None = None,
) -> list[str]:
    """Name the likely causes, the surest first, each with its way out in one line.

    Args:
        tables: Each rank's table, in rank order.
        differing: The names that differ.
        managed: The names whose gradients DDP averages, None without a wrapper.
        non_finite: The ranks that alone hold NaN or Inf, for the named tensors where there are some.
    """
    pattern = _find_pattern(tables, differing, managed)
    if managed is None and not any(pattern.steps):
        return [BUILD_ALIKE]  # nothing has been trained yet
    finders = (_steps, _unsynchronised, _unaveraged, _written, _state_alone)
    own_way = _structure(tables)
    causes = [own_way] if own_way else [cause for find in finders if (cause := find(pattern))]
    if non_finite:
        ranks = sorted({rank for odd in non_finite.values() for rank in odd})
        causes.append(
            f"{name_ranks(ranks)} alone {'hold' if len(ranks) > 1 else 'holds'} NaN or Inf, in "
            f"{_list(list(non_finite))}: averaged gradients would have brought it to all ranks, so it was written there"
        )
    return [f"likely cause: {cause}" for cause in causes] or [
        "way out: find what changed this between the last check that passed and this one; --watch.drift_every_steps 1 "
        "narrows it down to a step"
    ]


def _structure(tables: Sequence[Table]) -> str:
    forms = [
        {
            row.name: (row.kind, tuple(row.shape), row.dtype, row.requires_grad, row.tied_to)
            for row in table
            if not row.kind.startswith("optimizer")
        }
        for table in tables
    ]
    names = [
        name for name in {name: 0 for form in forms for name in form} if len({form.get(name) for form in forms}) > 1
    ]
    if not names:
        return ""
    return (
        f"ranks changed the model each in its own way, at {_list(names)}: freeze, unfreeze, add, remove and tie on all "
        "ranks alike, after the same step"
    )


def _find_pattern(tables: Sequence[Table], differing: Collection[str], managed: Collection[str] | None) -> Pattern:
    rows = {row.name: row for table in tables for row in table}
    first = {name: row for name, row in rows.items() if row.tied_to is None}
    trainable = [name for name, row in first.items() if row.kind == "parameter" and row.requires_grad]

    def pick(*kinds: str) -> list[str]:
        return [name for name in differing if name in first and first[name].kind in kinds]

    states = pick("optimizer state")
    moved = {name.removeprefix("optimizer: ").rpartition(" / ")[0] for name in states}
    return Pattern(
        trainable=trainable,
        parted=[name for name in trainable if name in differing or name in moved],
        written=[name for name in trainable if name in differing and name not in moved],
        unmanaged=None if managed is None else [name for name in trainable if name not in managed],
        frozen=[name for name in pick("parameter") if not first[name].requires_grad],
        buffers=pick("persistent buffer", "non-persistent buffer", "running statistic"),
        states=states,
        settings=pick("optimizer setting"),
        steps=[_count_steps(table) for table in tables],
    )


def _count_steps(table: Table) -> float:
    return max(
        (_number(row) for row in table if row.kind == "optimizer state" and row.name.endswith("/ step")), default=0
    )


def _number(row: Row) -> float:
    try:
        return float(row.value)
    except ValueError:  # a `step` that is no number, of somebody's own optimizer
        return 0


def _steps(pattern: Pattern) -> str:
    groups = group_ranks(dict(enumerate(pattern.steps)))
    if len(groups) == 1:
        return ""
    most = max(pattern.steps)
    lost = [(int(most - float(str(count))), who) for count, who in groups if count != most]
    ahead = next(who for count, who in groups if count == most)
    fewer = ", ".join(
        f"{name_ranks(who)} took {gap} optimizer step{'s' * (gap > 1)} fewer than {name_ranks(ahead)}"
        for gap, who in lost
    )
    return (
        f"{fewer} ({', '.join(f'{count:g} on {name_ranks(who)}' for count, who in groups)}); "
        "a step must be taken or skipped by all ranks alike: no condition that one rank alone sees around it"
    )


def _unsynchronised(pattern: Pattern) -> str:
    parted = [name for name in pattern.unmanaged or () if name in pattern.parted]
    if not parted:
        return ""
    return (
        f"unsynchronised: {_list(parted)} {'were' if len(parted) > 1 else 'was'} made trainable or added after the "
        "wrap, so DDP never averages the gradient; unfreeze and add before `prepare`, or wrap the model anew"
    )


def _unaveraged(pattern: Pattern) -> str:
    unmanaged = pattern.unmanaged or ()
    managed = [name for name in pattern.trainable if name not in unmanaged]
    parted = [name for name in pattern.parted if name not in unmanaged]
    if not parted or len(parted) <= _MOST * len(managed) or len(set(pattern.steps)) > 1:
        return ""
    if any(pattern.steps) and not pattern.states:  # gradients of one's own would have left their mark there
        return ""
    alone = "" if any(pattern.steps) else ", or a rank took another number of steps (give optimizer= to tell)"
    if pattern.unmanaged is None:  # no wrapper to be seen: it may stand right before the wrap
        alone += ", or the ranks were built or loaded from different weights"
    return (
        f"{len(parted)} of {len(managed)} trainable parameters, or their optimizer states, differ: no gradient "
        "was averaged, because the inner module was called instead of the wrapped one (model.module, "
        f"unwrap_model(model)), or under no_sync(){alone}; call what `prepare` returned"
    )


def _written(pattern: Pattern) -> str:
    if _unaveraged(pattern) or len(set(pattern.steps)) > 1:
        return ""
    known = pattern.unmanaged or ()
    parts = []
    if pattern.frozen:
        parts.append(f"{_list(pattern.frozen)}, frozen, was written to on one rank")
    if parameters := [name for name in pattern.written if name not in known]:
        parts.append(f"{_list(parameters)} was written to on one rank, outside the optimizer's step")
    if pattern.buffers:
        parts.append(f"buffer {_list(pattern.buffers)} was updated on one rank, or by each from its own images")
    if not parts:
        return ""
    return "; ".join(parts) + "; write the same on all ranks, or broadcast it from one"


def _state_alone(pattern: Pattern) -> str:
    if len(set(pattern.steps)) > 1 or _unaveraged(pattern) or _unsynchronised(pattern):
        return ""
    if pattern.settings:
        return (
            f"{_list(pattern.settings)} was set on one rank alone (a scheduler that one rank steps, say); the next "
            "step parts the parameters: set it on all ranks alike"
        )
    if not pattern.states:
        return ""
    return (
        f"the optimizer's state, at {_list(pattern.states)}, was loaded or changed on one rank alone; the next step "
        "parts the parameters: load the same checkpoint on all ranks"
    )


def _list(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
