"""Random draws that depend on what they are for, not on who makes them or what was drawn before."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import xxhash


def mix_seed(*numbers: int) -> int:
    """Mix numbers in [0, 2**64) into one seed in [0, 2**63); any change of any number gives an unrelated seed."""
    return xxhash.xxh3_64_intdigest(b"".join(n.to_bytes(8, "little") for n in numbers)) >> 1


def seed_draws(*numbers: int) -> None:
    """Seed Python's, numpy's and torch's global CPU streams from `numbers`, in place."""
    seed = mix_seed(*numbers)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


@contextmanager
def own_draws() -> Iterator[None]:
    """Leave the global streams at the exit as they were at the entry, so that dropout's draws are not disturbed."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])
