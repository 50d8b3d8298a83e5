import random

import numpy as np
import torch

from train.draws import mix_seed, own_draws, seed_draws


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_equal_numbers_give_equal_draws_and_any_change_gives_others():
    seen = set()
    for numbers in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0)]:
        with own_draws():
            seed_draws(*numbers)
            first = draw()
            seed_draws(*numbers)
            assert draw() == first
        seen |= set(first)
    assert len(seen) == 15


def test_own_draws_leaves_the_three_streams_as_they_were():
    seed_draws(7)
    expected = [draw(), draw()]
    seed_draws(7)
    got = [draw()]
    with own_draws():
        seed_draws(1)
        draw()
    got.append(draw())
    assert got == expected


def test_own_draws_restores_after_an_error():
    seed_draws(7)
    expected = draw()
    seed_draws(7)
    try:
        with own_draws():
            draw()
            raise KeyError("planted")
    except KeyError:
        pass
    assert draw() == expected


def test_mixed_seed_is_stable_and_fits_torch():
    assert mix_seed(0, 1) != mix_seed(1, 0)
    assert all(0 <= mix_seed(a, b) < 2**63 for a in range(20) for b in (0, 2**63 - 1))
