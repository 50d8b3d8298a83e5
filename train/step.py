"""One optimizer step: forward, backward, clip, check, move."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from train.errors import NonFiniteLoss
from train.faults import pulse
from train.loaders import Batch
from train.meter import StepResult
from train.optim import learning_rate, set_learning_rate
from train.ranks import gather_json
from train.run import Run


def train_step(run: Run, batches: Sequence[Batch]) -> StepResult:
    """Take one optimizer step over `accumulation_steps` micro-batches and advance `run.step`; all ranks together.

    Gradients are dropped at the start of a step and stay after it, so that an audit can look at them.

    Raises:
        NonFiniteLoss: On every rank, if the loss of any is NaN or infinite; the weights are as before the step.
    """
    settings, optimizer = run.config.optimizer, run.optimizer
    optimizer.zero_grad()
    run.model.train()
    losses = []
    for images, targets in batches:
        with run.accelerator.accumulate(run.model):
            pulse.mark(f"step {run.step + 1}: forward")
            logits = run.model(run.to_device(images))
            targets = targets.to(run.accelerator.device, non_blocking=True)
            loss = F.cross_entropy(logits.float(), targets, label_smoothing=settings.label_smoothing)
            losses.append(loss.detach())
            pulse.mark(f"step {run.step + 1}: backward, and the exchange of gradients")
            run.accelerator.backward(_poisoned(loss))
    mean = torch.stack(losses).mean()
    norm = run.accelerator.clip_grad_norm_(run.model.parameters(), settings.clip_grad_norm or float("inf"))
    assert isinstance(norm, Tensor)
    _check_finite(run, mean, norm)
    lr = learning_rate(
        run.plan.find_schedule_step(run.step),
        peak=settings.lr,
        warmup_steps=run.warmup_steps,
        total_steps=run.steps_per_epoch * run.config.schedule.epochs,
        min_ratio=run.config.schedule.min_lr_ratio,
    )
    set_learning_rate(optimizer, lr)
    optimizer.step()
    run.step += 1
    images_seen = sum(len(targets) for _, targets in batches) * run.accelerator.num_processes
    return StepResult(mean, lr, images_seen)


def _poisoned(loss: Tensor) -> Tensor:
    """Return the loss as it is, or NaN if it is not finite: through DDP's average, all ranks see it in the gradients.

    An infinite loss alone may have finite ones: fp16's logit of -inf, to which softmax answers with a probability of 0.
    """
    return loss * (1 + 0 * loss.detach())


def _check_finite(run: Run, loss: Tensor, norm: Tensor) -> None:
    """Raise on every rank if a loss is not finite anywhere.

    The gradients are averages over the ranks, so their norm is the same number on all of them: it alone decides whether
    to look closer, and the look is a collective that every rank then joins. In fp16 an overflow of the scaled gradient
    is normal, and skipped by the scaler, as long as the losses are finite.
    """
    if torch.isfinite(norm):
        return
    values = [str(value) for value in gather_json(str(loss.item()), run.accelerator)]
    bad = {rank: value for rank, value in enumerate(values) if value in ("nan", "inf", "-inf")}
    if not bad and run.accelerator.mixed_precision == "fp16":
        return
    what = ", ".join(f"{value} on rank {rank}" for rank, value in bad.items()) or "finite, but its gradient is not"
    raise NonFiniteLoss(
        f"step {run.step}: the loss is {what}; stopped before the weights moved, {run.last_checkpoint()}. "
        f"Try a lower --optimizer.lr (now {run.config.optimizer.lr:g}) or another --model.init"
    )
