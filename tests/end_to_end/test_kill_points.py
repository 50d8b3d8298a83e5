"""A run that is killed at random points, the save among them, ends with the bits of one that was never stopped."""

import random
from collections.abc import Callable

import pytest

from tests.end_to_end.chain import Chain, begin, make_store
from tests.end_to_end.killed_rank import FAULTS, KillPoint, draw_kill_point
from tests.train.tiny import write_images

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning"),  # MLflow's own, not ours to mend
]
SEED = 4
KILLS = {1: 6, 2: 6, 3: 6, 4: 6}  # for each number of ranks
POINTS_OF_A_SAVE = 21

Begin = Callable[..., Chain]


@pytest.fixture(scope="module")
def new_chain(tmp_path_factory: pytest.TempPathFactory) -> Begin:
    """`new_chain(world_size, fault=...)` lays a run out, on the same 33 images, with a store that holds no run yet."""
    images = write_images(tmp_path_factory.mktemp("images") / "images", train=11)
    store = make_store(tmp_path_factory.mktemp("store") / "mlflow.db")

    def new(world_size: int, *, fault: str = "") -> Chain:
        return begin(tmp_path_factory.mktemp("chain") / "run", world_size, images, store, fault=fault)

    return new


@pytest.fixture(scope="module")
def never_stopped(new_chain: Begin) -> Callable[[int], Chain]:
    """The run on so many ranks that was never stopped."""
    made: dict[int, Chain] = {}

    def find(world_size: int) -> Chain:
        if world_size not in made:
            made[world_size] = new_chain(world_size)
            assert made[world_size].advance()
        return made[world_size]

    return find


def finish(chain: Chain, straight: Chain) -> None:
    assert chain.advance(), chain.describe()
    assert chain.differences(straight) == [], f"seed {SEED}: {chain.describe()}\n{chain.printed()}"


@pytest.mark.parametrize("world_size", KILLS)
def test_run_killed_at_random_points_ends_as_if_it_had_not_been(
    world_size: int, new_chain: Begin, never_stopped: Callable[[int], Chain]
) -> None:
    straight, draws = never_stopped(world_size), random.Random(f"{SEED} {world_size}")
    left = KILLS[world_size]
    while left:
        chain = new_chain(world_size)
        while left and not chain.advance(draw_kill_point(draws, world_size)):
            left -= 1
        finish(chain, straight)
        print(chain.describe())  # noqa: T201  (shown for a failure)


def test_run_killed_at_every_point_of_a_save_ends_as_if_it_had_not_been(
    new_chain: Begin, never_stopped: Callable[[int], Chain]
) -> None:
    """Within and after each file; after each flush and the rename; within and after removing an older one."""
    chain = new_chain(1)
    for count in range(1, POINTS_OF_A_SAVE + 1):
        assert not chain.advance(KillPoint("save", count)), chain.describe()
    finish(chain, never_stopped(1))


@pytest.mark.parametrize("fault", FAULTS)
def test_resume_without_one_of_its_parts_is_seen(fault: str, new_chain: Begin) -> None:
    """On three ranks, which is where buckets count; it goes on from step 8, amid an epoch of 5 and a record's 3."""
    straight, chain = new_chain(3, fault=fault), new_chain(3, fault=fault)
    assert straight.advance()
    assert not chain.advance(KillPoint("backward", 17, (0, 1, 2)))
    assert chain.advance()
    found = chain.differences(straight)
    assert found, fault
    if fault == "no losses since the last record":
        assert [line.partition(":")[0] for line in found] == ["train/loss"]
    else:
        assert {"model.safetensors", "optimizer.safetensors"} <= set(found)
