"""Random draws that depend on what they are for, not on who makes them or what was drawn before."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
import xxhash
from torch import Tensor


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


def rng_states() -> dict[str, Tensor]:
    """Return this process's random states by kind: torch's, uint8; Python's and numpy's as numbers, float64.

    Augmentation has seeds of its own; these are what dropout draws from, and attention of a user's own may.
    """
    version, words, gauss = random.getstate()
    assert version == 3, f"Python's random state is of version {version}"
    name, key, position, has_gauss, cached = cast(tuple[str, Any, int, int, float], np.random.get_state())
    assert name == "MT19937", f"numpy's random state is {name}"
    states = {
        "cpu": torch.get_rng_state(),
        "python": torch.tensor([*words, gauss is not None, gauss or 0.0], dtype=torch.float64),  # words are of 32 bits
        "numpy": torch.tensor([*key.tolist(), position, has_gauss, cached], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_rng(states: Mapping[str, Tensor]) -> None:
    """Set this process's random states; a kind that is missing stays as it is."""
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "python" in states:
        *words, has_gauss, gauss = states["python"].tolist()
        random.setstate((3, tuple(map(int, words)), gauss if has_gauss else None))
    if "numpy" in states:
        *key, position, has_gauss, cached = states["numpy"].tolist()
        np.random.set_state(("MT19937", np.array(key, dtype=np.uint32), int(position), int(has_gauss), cached))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
