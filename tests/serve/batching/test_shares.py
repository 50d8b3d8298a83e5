import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.batching.shares import Job, share_out


def build(*counts: int) -> list[Job]:
    loop = asyncio.new_event_loop()
    loop.close()  # a future wants one, these are never awaited
    return [Job(np.zeros((count, 3, 1, 1), np.float32), loop.create_future(), 0, 0) for count in counts]


@pytest.mark.parametrize(
    ("counts", "room", "wanted"),
    [
        ((), 8, []),
        ((3,), 8, [3]),
        ((30,), 8, [8]),
        ((1,) * 9, 8, [1] * 8),
        ((30, 1), 8, [7, 1]),
        ((30, 1, 1, 1, 1, 1, 1), 8, [4, 1, 1, 1, 1]),
        ((30, 30), 8, [7, 1]),
        ((1, 30), 8, [1, 7]),
        ((1, 30, 1), 8, [1, 6, 1]),
        ((2, 2, 30, 1), 8, [2, 2, 3, 1]),
    ],
)
def test_half_is_for_the_first_and_half_for_those_behind(counts: tuple[int, ...], room: int, wanted: list[int]) -> None:
    jobs = build(*counts)
    for odd in (0, 1):
        shares = share_out(jobs, room, odd)
        assert [share.stop for share in shares] == wanted
        assert [share.job for share in shares] == jobs[: len(wanted)]


def test_an_odd_room_is_halved_in_turn() -> None:
    jobs = build(30, 1, 1)
    assert [[share.stop for share in share_out(jobs, 3, odd)] for odd in (1, 0)] == [[2, 1], [1, 1, 1]]
    assert [share_out(jobs, 1, odd)[0].job for odd in (1, 0)] == [jobs[0], jobs[1]]
    assert [share.stop for share in share_out(jobs[:1], 1, 0)] == [1]


def test_a_job_goes_on_where_it_was_cut() -> None:
    (job,) = build(10)
    job.left = 3
    assert share_out([job], 8, 1) == [(job, 7, 10)]


@given(st.lists(st.integers(1, 70), max_size=40), st.integers(1, 64), st.integers(0, 1))
def test_a_batch_is_full_wherever_it_can_be(counts: list[int], room: int, odd: int) -> None:
    shares = share_out(build(*counts), room, odd)
    assert sum(share.stop - share.start for share in shares) == min(room, sum(counts))
    assert all(0 <= share.start < share.stop <= len(share.job.images) for share in shares)


def test_answers_are_joined_in_the_order_of_the_images() -> None:
    async def join() -> np.ndarray:
        job = Job(np.zeros((5, 3, 1, 1), np.float32), asyncio.get_running_loop().create_future(), 0, 0)
        rows = np.arange(10, dtype=np.float32).reshape(5, 2)
        assert not job.add(rows[2:4], 2, 4)
        assert not job.add(rows[:2], 0, 2)
        assert job.add(rows[4:], 4, 5)
        return await job.done

    assert asyncio.run(join()).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
