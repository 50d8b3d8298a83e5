"""What a step did, and what all have done since the last record of the training metrics."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepResult:
    """What one step did on this rank.

    Attributes:
        loss: Mean loss over this rank's micro-batches, a detached scalar on the device.
        lr: The learning rate that was used.
        images: Images seen on all ranks together.
    """

    loss: Tensor
    lr: float
    images: int


@dataclass
class Meter:
    """Sums over the steps since the last record; time counts with the wait for data, without evaluation and saving.

    A resumed run takes the losses over, so that its first record is the mean over the same steps as if it had not been
    stopped; images and seconds count anew, for the throughput of the process that is there.
    """

    losses: list[Tensor] = field(default_factory=list)
    images: int = 0
    seconds: float = 0.0
    mark: float = field(default_factory=time.perf_counter)

    def add(self, result: StepResult) -> None:
        """Count one step that has just ended."""
        self.losses.append(result.loss)
        self.images += result.images
        self.seconds += time.perf_counter() - self.mark

    def go_on(self) -> None:
        """Start the clock of the next step."""
        self.mark = time.perf_counter()

    def reset(self) -> None:
        """Start anew after a record, in place."""
        self.losses, self.images, self.seconds = [], 0, 0.0
        self.go_on()

    def mean_loss(self) -> Tensor:
        """Return this rank's mean loss since the last record, a scalar; the record itself counts the ranks."""
        return torch.stack(self.losses).mean()

    def state(self) -> list[float]:
        """Return this rank's losses since the last record, for a checkpoint: float32 values, exact in JSON."""
        return torch.stack(self.losses).tolist() if self.losses else []

    def restore(self, losses: Sequence[float], device: torch.device) -> None:
        """Take a checkpoint's losses over, in place."""
        self.losses = list(torch.tensor(losses, dtype=torch.float32, device=device).unbind())
