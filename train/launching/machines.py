"""Which ranks run on which machine: a launcher counts on within a machine, and host names may be equal."""

from collections.abc import Sequence

from train.ranks import RankInfo


def group_by_machine(ranks: Sequence[RankInfo]) -> list[list[RankInfo]]:
    """Group ranks by their machine, in rank order."""
    machines: list[list[RankInfo]] = []
    for info in ranks:
        if info.local_rank == 0 or not machines:
            machines.append([])
        machines[-1].append(info)
    return machines


def say_where(ranks: Sequence[RankInfo]) -> str:
    """Return "ranks 0-7 on ada, ranks 8-15 on bob", for a message that names ranks alone; "" for a single machine."""
    machines = group_by_machine(ranks)
    if len(machines) == 1:
        return ""
    return ", ".join(f"{_say_range(infos)} on {infos[0].hostname}" for infos in machines)


def _say_range(infos: Sequence[RankInfo]) -> str:
    first, last = infos[0].rank, infos[-1].rank
    return f"rank {first}" if first == last else f"ranks {first}-{last}"
