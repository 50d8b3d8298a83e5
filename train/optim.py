"""The optimizer, its parameter groups, and the learning rate as a function of the step."""

import math
from collections.abc import Collection
from fnmatch import fnmatchcase

from timm.optim import param_groups_weight_decay
from torch import nn
from torch.optim import AdamW, Optimizer

from train.config import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> AdamW:
    """Build AdamW over the trainable parameters, in two groups: matrices decay, the rest does not.

    Biases, norms and other 1-D tensors are exempt, and what the backbone's own `no_weight_decay` names. A tied tensor
    is held once, and exempt if any of its names is.

    Args:
        model: The bare model, frozen where it is to be frozen.
        config: Learning rate, decay, betas, eps.
    """
    groups = param_groups_weight_decay(model, config.weight_decay, no_weight_decay_list=find_exempt(model))
    return AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=True,  # on CPUs too: a third of the time of the loop over tensors
    )


def find_exempt(model: nn.Module) -> set[str]:
    """Return the first name of every parameter that the backbone's own `no_weight_decay` spares under any name."""
    named = getattr(model, "no_weight_decay", None)
    patterns: Collection[str] = named() if callable(named) else ()
    spared = {
        id(parameter)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if any(fnmatchcase(name, pattern) for pattern in patterns)  # as timm reads them
    }
    return {name for name, parameter in model.named_parameters() if id(parameter) in spared}


def learning_rate(step: float, *, peak: float, warmup_steps: int, total_steps: int, min_ratio: float) -> float:
    """Return the learning rate of one optimizer step: linear warm-up, then a cosine (Loshchilov and Hutter 2017).

    A function of the step alone: it is the same for any number of ranks, and needs no state to resume.

    Args:
        step: The step about to be taken, from 0; between two whole numbers where other ranks took an epoch over.
        peak: Largest learning rate.
        warmup_steps: Steps over which it rises to `peak`; the first one already moves.
        total_steps: Steps of the whole run.
        min_ratio: What is left at the end, as part of `peak`, in 0-1.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return peak * (min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Give every parameter group the learning rate `lr`, in place."""
    for group in optimizer.param_groups:
        group["lr"] = lr
