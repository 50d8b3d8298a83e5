"""How groups of ranks are put into words: "rank 1", "ranks 0, 2"."""

from collections.abc import Hashable, Mapping, Sequence


def group_ranks(values: Mapping[int, Hashable]) -> list[tuple[Hashable, list[int]]]:
    """Group ranks by value, the largest group first, among equals the one with the lowest rank."""
    groups: dict[Hashable, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    return sorted(groups.items(), key=lambda group: (-len(group[1]), group[1][0]))


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 0, 2"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def say_values(values: Mapping[int, Hashable]) -> str:
    """Return "0.1 on rank 0, 0.2 on ranks 1, 2": each value and the ranks that hold it."""
    return ", ".join(f"{value} on {name_ranks(members)}" for value, members in group_ranks(values))
