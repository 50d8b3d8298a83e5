"""Where in the data a step is, and how far along the schedule: arithmetic on the number of steps alone.

`step` counts optimizer steps and only grows, whatever number of images each of them takes. While the global batch is
what it was at the start, a step's place follows from its number. Where other ranks take a run over, and the global
batch is another, the present epoch goes on behind the images that it has seen, and every later epoch is whole.
"""

from dataclasses import dataclass
from typing import NamedTuple


class Position(NamedTuple):
    """A place in the data: an epoch, from 0, and how many images of its order were seen before."""

    epoch: int
    images: int


@dataclass(frozen=True)
class Origin:
    """Where the present global batch size began; all zero in a run that has had no other.

    Attributes:
        step: Optimizer steps done until then.
        epoch: The epoch that was under way then, from 0.
        images: Images of its order that had been seen then.
    """

    step: int = 0
    epoch: int = 0
    images: int = 0


@dataclass(frozen=True)
class EpochPlan:
    """How a run's steps lie in its epochs.

    Attributes:
        num_images: Size of the whole training set; the tail of an epoch that fills no step is left out.
        global_batch_size: Images of one optimizer step on all ranks together, at most `num_images`.
        epochs: Epochs of the whole run.
        origin: Where this global batch size began.
    """

    num_images: int
    global_batch_size: int
    epochs: int
    origin: Origin = Origin()

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a whole epoch."""
        return self.num_images // self.global_batch_size

    @property
    def total_steps(self) -> int:
        """The last step of the run."""
        later = self.steps_per_epoch * (self.epochs - self.origin.epoch - 1)
        return self.origin.step + self._steps_of_first_epoch + later

    def locate(self, step: int) -> Position:
        """Return where the step after `step` steps starts, `step` in [origin.step, total_steps].

        The end of an epoch is the start of the next.
        """
        done = step - self.origin.step
        assert done >= 0, f"step {step} is before {self.origin}"
        if done < self._steps_of_first_epoch:
            return Position(self.origin.epoch, self.origin.images + done * self.global_batch_size)
        epochs, steps = divmod(done - self._steps_of_first_epoch, self.steps_per_epoch)
        return Position(self.origin.epoch + 1 + epochs, steps * self.global_batch_size)

    def find_schedule_step(self, step: int) -> float:
        """Return how far along the learning rate's schedule `step` is, in steps of this global batch size.

        It is `step` itself while there was no other size. Epochs align: the start of epoch e is e x `steps_per_epoch`.
        """
        epoch, images = self.locate(step)
        return epoch * self.steps_per_epoch + images / self.global_batch_size

    def go_on_as(self, global_batch_size: int, step: int) -> "EpochPlan":
        """Return the plan of a run that takes this one over at `step`, with another global batch or the same."""
        if global_batch_size == self.global_batch_size:
            return self
        return EpochPlan(self.num_images, global_batch_size, self.epochs, Origin(step, *self.locate(step)))

    @property
    def _steps_of_first_epoch(self) -> int:
        """Steps that are left of the epoch that was under way at the origin; none if less than a global batch is."""
        return (self.num_images - self.origin.images) // self.global_batch_size
