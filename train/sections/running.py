"""How a run is looked after: scored, saved, watched, told of."""

from train.fields import Count, Positive, Section


class EvaluateConfig(Section):
    """Scoring on the validation images."""

    every_epochs: Count = 1
    """Epochs between evaluations; the last epoch is always scored."""
    batch_size_per_rank: Count = 64
    """Images of one forward on one rank."""

    def due(self, epoch: int) -> bool:
        """Return whether to evaluate after `epoch` epochs are done, counted from 1."""
        return epoch % self.every_epochs == 0


class CheckpointConfig(Section):
    """Saving the state of a run."""

    every_epochs: Count = 1
    """Epochs between checkpoints; the last epoch is always saved."""
    every_steps: Count | None = None
    """Optimizer steps between checkpoints, beside those at epochs' ends; null saves at these alone."""
    keep: Count = 2
    """Newest checkpoints to keep."""

    def due(self, epoch: int) -> bool:
        """Return whether to save after `epoch` epochs are done, counted from 1."""
        return epoch % self.every_epochs == 0

    def due_at(self, step: int) -> bool:
        """Return whether to save after `step` optimizer steps are done, wherever in the epoch that is."""
        return self.every_steps is not None and step % self.every_steps == 0


class WatchConfig(Section):
    """What ends a run that has gone wrong, on all ranks together, and how soon that is seen."""

    timeout_s: Positive = 600
    """Seconds in which a rank must get on (to its next batch, step or file); after them it counts as hung."""
    silence_s: Positive = 20
    """Seconds without a sign of life from a rank's process after which it counts as lost."""
    drift_every_steps: Count = 200
    """Optimizer steps between two proofs that all ranks still hold the same weights and optimizer state."""


class LogConfig(Section):
    """What is told while training."""

    every_steps: Count = 50
    """Optimizer steps between two records of the training metrics."""
    progress: bool = True
    """Show a progress bar on the main process."""

    def due(self, step: int) -> bool:
        """Return whether to log after `step` optimizer steps are done, counted from 1."""
        return step % self.every_steps == 0
