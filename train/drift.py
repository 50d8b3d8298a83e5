"""Prove now and then, in a training under way, that all ranks still hold the same model and optimizer state.

In any loop, after `optimizer.step()`:

    drift = DriftCheck(model, accelerator, optimizer, every_steps=200)
    ...
    drift.after_step(step)
"""

import logging
import time

from accelerate import Accelerator
from torch import nn
from torch.distributed import PrefixStore, distributed_c10d  # type: ignore[attr-defined]  # public, but for the stubs
from torch.optim import Optimizer

from train.equality.phrases import name_ranks
from train.errors import RanksDisagree
from train.replicas import ReplicaReport, check_replicas
from zoo.auditing.snapshots import bare_model

logger = logging.getLogger(__name__)

_PERIOD_S = 0.01


class DriftCheck:
    """The checks of one training, and what they have cost. In a world of one it does nothing.

    Due after the first step, after every `every_steps`, after the last, and where what is trainable has changed: right
    then, and after the step that followed.

    Attributes:
        checks: Checks made.
        seconds: Wall time of all of them, the wait for slower ranks included.
    """

    def __init__(
        self,
        model: nn.Module,
        accelerator: Accelerator,
        optimizer: Optimizer | None = None,
        *,
        every_steps: int = 200,
        last_step: int | None = None,
        patience_s: float = 60.0,
    ) -> None:
        """Note what is trainable now; all ranks together, but nothing is gathered.

        Args:
            model: What the steps call: what `prepare` made of it.
            accelerator: The world.
            optimizer: Its optimizer, whose states and settings are compared too.
            every_steps: Steps between two checks, counted from 0 and not from here: a resumed run checks at the same.
            last_step: The step that ends the training, if it is known.
            patience_s: Seconds to wait for the other ranks where this one's trainable parameters have changed.
        """
        self.checks, self.seconds = 0, 0.0
        self._model, self._accelerator, self._optimizer = model, accelerator, optimizer
        self._every_steps, self._last_step = every_steps, last_step
        self._patience_s = patience_s
        self._note()
        self._again = True  # after the first step

    def after_step(self, step: int) -> ReplicaReport | None:
        """Check if it is due; every rank calls it after every optimizer step.

        Args:
            step: Optimizer steps done.

        Returns:
            What was compared, None where nothing was due.

        Raises:
            ReplicaMismatch: If ranks differ; on every rank.
            RanksDisagree: If trainable parameters have changed on this rank, and not on another after the same step.
        """
        return self.check(step) if self.due(step) else None

    def due(self, step: int) -> bool:
        """Say whether to check after `step`; the same on every rank. Call it once a step: it notes what is trainable.

        Raises:
            RanksDisagree: As `after_step`.
        """
        if self._accelerator.num_processes == 1:
            return False
        again, self._again = self._again, False
        if self._look() != self._trainable:
            self._note()
            self._again = True  # a change after the step shows only after the next
            self._await_others(step)
            return True
        return again or step % self._every_steps == 0 or step == self._last_step

    def check(self, step: int) -> ReplicaReport:
        """Check now; every rank calls it.

        Args:
            step: Optimizer steps done.

        Raises:
            ReplicaMismatch: If ranks differ; on every rank.
        """
        start = time.perf_counter()
        try:
            report = check_replicas(
                self._model, self._accelerator, when=f"after step {step}", buffers="drift", optimizer=self._optimizer
            )
        finally:
            self.seconds += time.perf_counter() - start
        self.checks += 1
        logger.debug("%s", report)
        return report

    def describe(self, seconds: float) -> str:
        """Say how often it was checked, and what that has cost.

        Args:
            seconds: Wall time of the whole training.
        """
        times = "once" if self.checks == 1 else f"{self.checks} times"
        return f"replicas checked {times}, {self.seconds / max(seconds, 1e-9):.2%} of training time"

    def _note(self) -> None:
        modules = list(bare_model(self._model).modules())
        self._parameters = [module._parameters for module in modules]
        self._children = [module._modules for module in modules]
        self._trainable = self._look()

    def _look(self) -> list[object]:
        """Return what changes when a parameter is frozen, unfrozen, added or removed, in microseconds."""
        flags: list[object] = [
            tensor is not None and tensor.requires_grad for held in self._parameters for tensor in held.values()
        ]
        flags.append(sum(map(len, self._children)))
        return flags

    def _await_others(self, step: int) -> None:
        """Wait until every rank has seen a change after this step, over the store: a collective would never return."""
        rank, world_size = self._accelerator.process_index, self._accelerator.num_processes
        store = PrefixStore("attention-zoo/trainable", distributed_c10d._get_default_store())
        store.set(f"{step}/{rank}", "changed")
        deadline = time.monotonic() + self._patience_s
        while missing := [other for other in range(world_size) if not store.check([f"{step}/{other}"])]:
            if time.monotonic() > deadline:
                raise RanksDisagree(
                    f"rank {rank}: trainable parameters changed before the end of step {step}, but not on "
                    f"{name_ranks(missing)} in {self._patience_s:g} s: freeze and unfreeze after the same step on "
                    "all ranks"
                )
            time.sleep(_PERIOD_S)
