"""Put into words in what ranks disagree, where they are, and the way out."""

import json
from collections.abc import Hashable, Mapping, Sequence

from train.equality.phrases import group_ranks, name_ranks
from train.ranks import JsonValue

_MOST = 8  # facts named of one kind; the rest are counted
_ABSENT = "absent"
_MAY_DIFFER = "device"
_WAYS_OUT = {
    "config": "give the launch command of every machine the same recipe, options and environment",
    "version": "install the same versions on all machines, as `pip install -c constraints.txt` does",
    "code": "check out the same commit on all machines, without local changes",
    "torch": "set torch up alike on all ranks: same build, same environment",
    "world": "start every machine's launcher with the same --num_processes and --num_machines",
    "data": "give all machines the same copy of data.root: same files, sizes and folders",
    "checkpoint": "let all ranks resume from the same checkpoint: share output_dir, or copy it to all machines",
    _MAY_DIFFER: "other hardware may round otherwise: the ranks stay equal as long as the drift check passes",
}
_SHARED = {
    "dropout": "torch's random state, which dropout draws from: set_seed(seed) gives all ranks the same one; call "
    "set_seed(seed, device_specific=True), or add the rank to the seed, after the model is built",
    "augmentation": "draws of the augmentation: seeded alike on all ranks; call set_seed(seed, device_specific=True), "
    "or draw from (seed, epoch, index of the image)",
    "images": "images of the first batch: the sampler was not told its rank; prepare the loader with Accelerate, or "
    "give the sampler rank and world size",
}


def describe_disagreement(ranks: Sequence[Mapping[str, JsonValue]], hosts: Sequence[str], *, what: str) -> str:
    """Describe how facts differ: a first line with counts, facts and odd ranks, a line for each fact, the ways out.

    Args:
        ranks: Each rank's facts, in rank order; at least two of them differ.
        hosts: Each rank's machine; named where there are several.
        what: What was compared, in a few words.
    """
    differing = find_differing(ranks)
    whole = group_ranks({rank: json.dumps(facts, sort_keys=True) for rank, facts in enumerate(ranks)})
    odd = [rank for _, members in whole[1:] for rank in members]
    kinds = dict.fromkeys(map(_kind, differing))
    lines = []
    for kind in kinds:
        names = [name for name in differing if _kind(name) == kind]
        lines += [f"{name}: {_say(differing[name], hosts)}" for name in names[:_MOST]]
        if len(names) > _MOST:
            lines.append(f"... and {len(names) - _MOST} more of {kind}")
    ways_out = [f"way out: {_WAYS_OUT[kind]}" for kind in kinds if kind in _WAYS_OUT]
    first = ", ".join(list(differing)[:3]) + (f" and {len(differing) - 3} more" if len(differing) > 3 else "")
    verb = "disagree" if len(odd) > 1 else "disagrees"
    return "\n  ".join(
        [
            f"{what}: {_where(odd, hosts)} of {len(ranks)} {verb} with {_where(whole[0][1], hosts)} on {first}",
            *lines,
            *ways_out,
        ]
    )


def find_differing(ranks: Sequence[Mapping[str, JsonValue]]) -> dict[str, dict[int, str]]:
    """Map each fact that differs to what each rank holds, as JSON; what may differ comes last."""
    found = {}
    for name in dict.fromkeys(name for facts in ranks for name in facts):
        values = {rank: json.dumps(facts[name]) if name in facts else _ABSENT for rank, facts in enumerate(ranks)}
        if len(set(values.values())) > 1:
            found[name] = values
    return dict(sorted(found.items(), key=lambda item: _kind(item[0]) == _MAY_DIFFER))


def is_told_only(ranks: Sequence[Mapping[str, JsonValue]]) -> bool:
    """Say whether all that differs is of the kind that may."""
    return all(_kind(name) == _MAY_DIFFER for name in find_differing(ranks))


def describe_shared(name: str, ranks: Sequence[Sequence[Hashable]]) -> str:
    """Say which two ranks hold the same of a stream, and why that may be; "" if none do.

    Args:
        name: The stream's, whose first word says what it is: dropout, augmentation or images.
        ranks: What each rank holds of it, in rank order; items within one rank may repeat.
    """
    owners: dict[Hashable, int] = {}
    for rank, items in enumerate(ranks):
        for item in items:
            other = owners.setdefault(item, rank)
            if other != rank:
                common = set(items) & set(ranks[other])
                counted = f" ({len(common)} of {len(set(items))}, such as {item})" if len(set(items)) > 1 else ""
                why = _SHARED.get(name.partition(" ")[0], "it must be each rank's own")
                return f"{name}: equal on ranks {other} and {rank}{counted}; likely cause: {why}"
    return ""


def _kind(name: str) -> str:
    return name.partition(":")[0]


def _say(values: Mapping[int, str], hosts: Sequence[str]) -> str:
    return ", ".join(f"{value} on {_where(members, hosts)}" for value, members in group_ranks(values))


def _where(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Name ranks, and their machines if there are several in the world."""
    machines = list(dict.fromkeys(hosts[rank] for rank in ranks))
    return name_ranks(ranks) + (f" ({', '.join(machines)})" if len(set(hosts)) > 1 else "")
