"""The state of one training: what the steps read and advance."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from train.config import TrainConfig
from train.data import Data
from train.loaders import Batch, Batches, TrainBatches
from train.meter import Meter
from train.position import EpochPlan
from train.tracking import Tracker
from zoo.card import ModelCard


@dataclass
class Run:
    """A training under way: what was built, and how far it is.

    Attributes:
        config: What the user asked for, resolved.
        accelerator: The world, the device and the precision.
        tracker: The MLflow run.
        data: Images, classes and fingerprints.
        card: What the model is, to go into its bundle.
        model: What the steps call: wrapped by DDP, autocast and torch.compile as asked.
        bare: The module inside; it shares all parameters with `model`.
        forward: `bare`'s own forward, before Accelerate put autocast around it: evaluation is in full precision.
        optimizer: Its optimizer, as prepared.
        train_loader: This rank's share of each epoch, in batches.
        val_loader: This rank's share of the validation images.
        folder: Where this run writes: OUTPUT_DIR/NAME/RUN_ID.
        plan: How the steps lie in the epochs.
        step: Optimizer steps done.
        meter: What was trained since the last record.
        saved: The checkpoint that this process has written, or gone on from, last.
        last_told: When training was last told of in a line, on the clock of `time.perf_counter`.
    """

    config: TrainConfig
    accelerator: Accelerator
    tracker: Tracker
    data: Data
    card: ModelCard
    model: nn.Module
    bare: nn.Module
    forward: Callable[[Tensor], Tensor]
    optimizer: Optimizer
    train_loader: TrainBatches
    val_loader: Batches
    folder: Path
    plan: EpochPlan
    step: int = 0
    meter: Meter = field(default_factory=Meter)
    saved: Path | None = None
    last_told: float = 0.0

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a whole epoch."""
        return self.plan.steps_per_epoch

    @property
    def total_steps(self) -> int:
        """The last step of the run."""
        return self.plan.total_steps

    @property
    def warmup_steps(self) -> int:
        """Steps over which the learning rate rises."""
        return round(self.steps_per_epoch * self.config.schedule.warmup_epochs)

    @property
    def epoch_ended(self) -> int | None:
        """Epochs done, if the last step ended one."""
        epoch, images = self.plan.locate(self.step)
        return None if images else epoch

    @property
    def last_epoch(self) -> bool:
        """Whether all steps are done."""
        return self.step == self.total_steps

    @property
    def checkpoints(self) -> Path:
        """Where this run's checkpoints are."""
        return self.folder / "checkpoints"

    def batches(self) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each step to come, from `step` to the last; a resumed run starts mid-epoch."""
        while self.step < self.total_steps:
            self.train_loader.set_position(*self.plan.locate(self.step))
            stream = iter(self.train_loader)  # to the end of the epoch, in whole steps
            while batches := list(islice(stream, self.config.loop.accumulation_steps)):
                yield batches

    def to_device(self, images: Tensor) -> Tensor:
        """Move images (B, 3, height, width) to this rank's device, in channels-last order if asked."""
        layout = torch.channels_last if self.config.loop.channels_last else torch.contiguous_format
        return images.to(self.accelerator.device, non_blocking=True, memory_format=layout)

    def last_checkpoint(self) -> str:
        """Say where the last good checkpoint is, for an error's line."""
        return f"the last good checkpoint is {self.saved}" if self.saved else "before the first checkpoint"
