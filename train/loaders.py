"""From a set to batches on one rank. The loaders belong to no framework: Accelerate must not prepare them again."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from train.config import EvaluateConfig, LoopConfig
from train.data import Data, Item
from train.draws import mix_seed
from train.errors import DataError
from train.sampler import Draw, EpochBatches, val_shard

_SET_DEATH_SIGNAL = 1  # Linux's PR_SET_PDEATHSIG
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

Batch = tuple[Tensor, Tensor]  # inputs, (B, 3, height, width), and labels, (B,) int64


class Batches:
    """Batches of one set on the CPU; an error of the data stays one line, also where a worker process met it."""

    def __init__(self, dataset: Dataset[Item], batch_sampler: EpochBatches | list[list[int]], num_workers: int) -> None:
        self.batch_sampler = batch_sampler
        self.loader: DataLoader[Item] = DataLoader(
            _Guarded(dataset),
            batch_sampler=batch_sampler,
            collate_fn=_collate,
            num_workers=num_workers,
            worker_init_fn=settle_worker,
            persistent_workers=num_workers > 0,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator().manual_seed(mix_seed(0)),  # else each pass draws from dropout's stream
        )

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Batch]:
        with _signals_held():
            batches = iter(self.loader)
        for batch in batches:
            if isinstance(batch, DataError):
                raise batch
            yield batch


class TrainBatches(Batches):
    """Batches of the training set; each pass is the next epoch."""

    batch_sampler: EpochBatches

    def set_position(self, epoch: int, images: int = 0) -> None:
        """Let the next pass go on in `epoch`, counted from 0, after the first `images` of its order."""
        self.batch_sampler.set_position(epoch, images)


def build_train_loader(data: Data, loop: LoopConfig, *, num_workers: int, rank: int, world_size: int) -> TrainBatches:
    """Build the training batches of one rank: disjoint over the ranks, whole optimizer steps only.

    Raises:
        DataError: If the set is smaller than one global batch.
    """
    batches = EpochBatches(
        len(data.train),
        loop.batch_size_per_rank,
        rank=rank,
        world_size=world_size,
        seed=data.seed,
        accumulation_steps=loop.accumulation_steps,
    )
    return TrainBatches(data.train, batches, num_workers)


def build_val_loader(data: Data, evaluate: EvaluateConfig, *, num_workers: int, rank: int, world_size: int) -> Batches:
    """Build the validation batches of one rank: over all ranks each image once; none for a rank without images."""
    shard = val_shard(len(data.val), rank, world_size)
    size = evaluate.batch_size_per_rank
    return Batches(data.val, [list(shard[i : i + size]) for i in range(0, len(shard), size)], num_workers)


def settle_worker(_worker_id: int) -> None:
    """Make a worker process live exactly as long as its rank wants it.

    A launcher sends SIGTERM, and a terminal Ctrl-C, to the whole group of processes, while the rank still needs batches
    for the step that it ends with. And a rank that is killed must leave no worker behind.
    """
    rank = multiprocessing.parent_process()
    if sys.platform != "linux" or rank is None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
        return
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != rank.pid:  # it has gone meanwhile
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    threading.Thread(target=_heed, args=(rank.pid,), daemon=True).start()


def _heed(rank: int | None) -> None:
    """Leave at the rank's own signal, which Python sends at its end, and at nobody else's."""
    while signal.sigwaitinfo(_STOPS).si_pid != rank:
        pass
    os._exit(0)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Hold signals back while workers are started, who inherit that, until each has settled."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Guarded(Dataset[Item]):
    """Hands a DataError on as data: a DataLoader would wrap it in a worker's traceback, of many lines."""

    def __init__(self, dataset: Dataset[Item]) -> None:
        self._dataset = dataset

    def __getitems__(self, keys: Sequence[Draw | int]) -> list[Item] | DataError:
        fetch = getattr(self._dataset, "__getitems__", None)
        try:
            return cast(list[Item], fetch(keys)) if fetch else [self._dataset[key] for key in keys]
        except DataError as error:
            return error


def _collate(items: list[Item] | DataError) -> Batch | DataError:
    return items if isinstance(items, DataError) else tuple(default_collate(items))
