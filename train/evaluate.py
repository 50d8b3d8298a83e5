"""Score a model on the validation images: each counted once, whatever the number of ranks."""

import math
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from train.equality.inventory import list_items
from train.errors import NonFiniteLoss
from train.faults import pulse
from train.replicas import share_statistics
from train.run import Run


@torch.inference_mode()
def evaluate(run: Run) -> dict[str, float]:
    """Score the model as it will be served: in eval mode, in full precision, on zoo.preprocess's images.

    Every rank scores its own share and the sums are added in float64: n images count as n, padded by none.

    Returns:
        `val/loss` (mean cross-entropy, without smoothing), `val/top1` and `val/top5` in 0-1, the same on every rank.

    Raises:
        NonFiniteLoss: On every rank, if the loss is NaN or infinite: such a model's hits are no score.
    """
    pulse.mark(f"after step {run.step}: evaluating")
    share_running_statistics(run)
    run.bare.eval()
    sums = torch.zeros(4, dtype=torch.float64)  # loss, top-1, top-5, images
    for images, targets in run.val_loader:
        logits = run.forward(run.to_device(images)).float().cpu()
        sums += score(logits, targets)
        pulse.touch()
    run.bare.train()
    pulse.mark(f"after step {run.step}: adding up the scores")
    total = cast(Tensor, run.accelerator.reduce(sums.to(run.accelerator.device), reduction="sum")).tolist()
    assert total[3] == len(run.data.val), f"scored {total[3]:.0f} of {len(run.data.val)} validation images"
    if not math.isfinite(total[0]):
        raise NonFiniteLoss(f"step {run.step}: val/loss is {total[0]}; {run.last_checkpoint()}")
    return {"val/loss": total[0] / total[3], "val/top1": total[1] / total[3], "val/top5": total[2] / total[3]}


def score(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sums over a batch: cross-entropy, hits of the first class, hits among the first five, images.

    Args:
        logits: (B, K).
        targets: Class indices, (B,).

    Returns:
        Float64, (4,).
    """
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices
    hits = best == targets[:, None]
    loss = F.cross_entropy(logits, targets, reduction="sum")
    sums = (loss.item(), hits[:, 0].sum().item(), hits.sum().item(), len(targets))
    return torch.tensor(sums, dtype=torch.float64)


def share_running_statistics(run: Run) -> None:
    """Give every rank the main process's running statistics: DDP leaves each rank its own. Other buffers are one's own.

    What else differs between ranks is a fault, which the drift check finds as long as nothing mends it silently.
    """
    if run.accelerator.num_processes == 1:
        return
    items = list_items(run.bare, buffers="drift")
    share_statistics([item.tensor for item in items if item.kind == "running statistic" and item.tensor is not None])
