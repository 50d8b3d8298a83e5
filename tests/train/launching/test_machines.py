import pytest

from train.launching.machines import group_by_machine, say_where
from train.ranks import RankInfo


def world(*machines: tuple[str, int]) -> list[RankInfo]:
    """Return the ranks of machines, each given by its hostname and its number of ranks."""
    places = [(name, local_rank) for name, count in machines for local_rank in range(count)]
    return [RankInfo(rank, local, f"cuda:{local}", "nccl", name, 1) for rank, (name, local) in enumerate(places)]


@pytest.mark.parametrize("names", [("ada", "bob"), ("node", "node")])
def test_ranks_are_grouped_by_machine_also_where_names_are_equal(names) -> None:
    machines = group_by_machine(world((names[0], 2), (names[1], 1)))
    assert [[info.rank for info in infos] for infos in machines] == [[0, 1], [2]]


def test_where_ranks_are_is_said_of_several_machines_alone() -> None:
    assert say_where(world(("ada", 8), ("bob", 1))) == "ranks 0-7 on ada, rank 8 on bob"
    assert say_where(world(("ada", 2))) == ""
