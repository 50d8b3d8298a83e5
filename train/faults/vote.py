"""All ranks leave after the same step: each step they vote on it, and nobody waits for the count."""

import torch
import torch.distributed as dist
from accelerate import Accelerator

from train.faults import stop


class StopVote:
    """A vote at each step. The count of one is read at the next, so it costs no wait; a stop comes a step later.

    On the host, over gloo, whatever carries the gradients: a GPU's queue may run far behind.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        """Open the vote; all ranks together."""
        self._group = dist.new_group(backend="gloo") if accelerator.num_processes > 1 else None
        self._under_way: tuple[dist.Work, torch.Tensor] | None = None

    def cast(self) -> bool:
        """Vote by whether this rank was asked to stop; return whether all leave now, the same on every rank."""
        leave = self._count()
        if leave:
            stop.grant()
        return leave

    def _count(self) -> bool:
        if self._group is None:
            return stop.requested() is not None
        before = self._under_way
        ballot = torch.tensor([float(stop.requested() is not None)])
        work = dist.all_reduce(ballot, op=dist.ReduceOp.MAX, group=self._group, async_op=True)  # type: ignore[arg-type]
        assert work is not None
        self._under_way = work, ballot
        if before is None:
            return False
        before[0].wait()
        return bool(before[1].item())
