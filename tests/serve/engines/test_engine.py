import numpy as np
import pytest

from serve.engines.cores import count_cores
from serve.engines.engine import EngineOptions, cut, list_batch_sizes


def test_a_batch_is_cut_to_what_one_pass_takes() -> None:
    images = np.arange(7)[:, None]
    assert [list(some[:, 0]) for some in cut(images, 3)] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [len(some) for some in cut(images[:0], 3)] == [0]


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (12, (1, 2, 4, 8, 12))]
)
def test_prepared_batch_sizes_are_powers_of_two_and_the_largest(most: int, sizes: tuple[int, ...]) -> None:
    assert list_batch_sizes(most) == sizes


def test_threads_are_all_this_process_may_use() -> None:
    assert EngineOptions(threads=3).num_threads == 3
    assert EngineOptions().num_threads == count_cores()
