"""How it learns: the optimizer, the learning rate, and how a step is computed."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from train.fields import Count, Momentum, NonNegative, Positive, Probability, Section


class OptimizerConfig(Section):
    """AdamW and what surrounds one step."""

    lr: Positive = 1e-3
    """Peak learning rate at the global batch, whatever number of ranks makes it up: it is never rescaled."""
    weight_decay: NonNegative = 0.05
    """Decoupled weight decay, on matrices only: biases, norms, tokens and positions are exempt."""
    betas: tuple[Momentum, Momentum] = (0.9, 0.999)
    """Decay rates of the running mean and square of the gradient."""
    eps: Positive = 1e-8
    """Added to the denominator."""
    clip_grad_norm: Positive | None = 1.0
    """Largest norm of the whole gradient; null does not clip."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Part of each target spread over all classes, in 0-1."""


class ScheduleConfig(Section):
    """The learning rate over the run: linear warm-up, then a cosine."""

    epochs: Count = 90
    """Passes over the training images."""
    warmup_epochs: NonNegative = 5.0
    """Epochs over which the learning rate rises from near 0 to its peak."""
    min_lr_ratio: Probability = 0.0
    """Learning rate at the end, as part of the peak."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.warmup_epochs > self.epochs:
            raise ValueError(f"warmup_epochs {self.warmup_epochs:g} is more than epochs {self.epochs}; lower the first")
        return self


class LoopConfig(Section):
    """How a step is computed."""

    batch_size_per_rank: Count = 32
    """Images of one forward and backward on one rank."""
    accumulation_steps: Count = 1
    """Forwards and backwards for one optimizer step. Global batch = this x batch_size_per_rank x ranks."""
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    """Arithmetic of the forward."""
    compile: bool = False
    """Compile the model with torch.compile."""
    channels_last: bool = False
    """Keep images in channels-last memory order."""
