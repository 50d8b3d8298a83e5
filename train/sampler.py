"""Which images each rank sees, in what order: a function of (seed, epoch, images seen of it) alone.

So a run can go on from any step of any epoch, and sees what it would have seen; with other ranks, nothing twice.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.utils.data import Sampler

from train.draws import mix_seed
from train.errors import DataError


class Draw(NamedTuple):
    """One image of one epoch: what a training set is asked for."""

    epoch: int
    image: int


class EpochBatches(Sampler[list[Draw]]):
    """Batches of one rank: disjoint over the ranks, another order each epoch, the short tail dropped.

    A global batch is cut from one permutation of the whole set, and each rank takes its part of it. Each pass goes on
    to the next epoch, also where the last was left by `break`.
    """

    def __init__(
        self,
        num_images: int,
        batch_size: int,
        *,
        rank: int,
        world_size: int,
        seed: int,
        accumulation_steps: int = 1,
    ) -> None:
        """Plan the batches.

        Args:
            num_images: Size of the whole training set.
            batch_size: Images of one batch on one rank.
            rank: This process, in [0, world_size).
            world_size: Number of processes.
            seed: The run's seed, the same on all ranks.
            accumulation_steps: Batches of one optimizer step; an epoch has whole steps only.

        Raises:
            DataError: If the set is too small for one optimizer step.
        """
        step_size = batch_size * world_size * accumulation_steps
        if num_images < step_size:
            raise DataError(
                f"{num_images} training images are fewer than one global batch of {step_size} = {batch_size} per rank "
                f"x {world_size} ranks x {accumulation_steps} accumulation steps; lower --loop.batch_size_per_rank"
            )
        self._num_images, self._batch_size = num_images, batch_size
        self._rank, self._world_size, self._seed = rank, world_size, seed
        self._step_size, self._accumulation_steps = step_size, accumulation_steps
        self._epoch, self._images = 0, 0

    def __len__(self) -> int:
        """Return the batches of a whole epoch on each rank, wherever the next pass starts."""
        return self._count(self._num_images)

    def set_position(self, epoch: int, images: int = 0) -> None:
        """Let the next pass go on in `epoch`, counted from 0, after the first `images` of its order, seen by all ranks.

        Raises:
            ValueError: If no whole optimizer step is left there.
        """
        if epoch < 0 or not 0 <= images <= self._num_images - self._step_size:
            raise ValueError(
                f"epoch {epoch} has no step of {self._step_size} images after the first {images} of {self._num_images}"
            )
        self._epoch, self._images = epoch, images

    def __iter__(self) -> Iterator[list[Draw]]:
        epoch, seen = self._epoch, self._images
        self._epoch, self._images = epoch + 1, 0  # now, at the first draw: a pass left by `break` is over too
        generator = torch.Generator().manual_seed(mix_seed(self._seed, epoch))
        order = torch.randperm(self._num_images, generator=generator).tolist()
        for batch in range(self._count(self._num_images - seen)):
            start = seen + (batch * self._world_size + self._rank) * self._batch_size
            yield [Draw(epoch, image) for image in order[start : start + self._batch_size]]

    def _count(self, images: int) -> int:
        """Return the batches of this rank in so many images, of whole optimizer steps alone."""
        return images // self._step_size * self._accumulation_steps


def val_shard(num_images: int, rank: int, world_size: int) -> range:
    """Return the indices that `rank` scores: over all ranks each image once; none if images are few."""
    return range(rank, num_images, world_size)
