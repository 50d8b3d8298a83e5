"""DDP's buckets, brought into their lasting order before the first step.

DDP lays gradients into buckets in the order of registration at first, and after one backward in the order in which
they became ready. From three ranks on, the place in a bucket decides in which order ranks are added up, and so the last
bits. A run that is stopped and goes on would take its first step in the first order again, and end with other bits than
one that was never stopped. One backward whose result nobody sees, at the start of every process, makes them alike.
"""

import torch
from torch.nn import functional as F

from train.draws import own_draws
from train.run import Run


def settle_buckets(run: Run) -> None:
    """Take one discarded forward and backward of zeros; weights, buffers, gradients and random states stay. All ranks.

    Shape, precision and compilation are the training step's own. A world of one has no buckets.
    """
    if run.accelerator.num_processes == 1:
        return
    loop, device = run.config.loop, run.accelerator.device
    images = run.to_device(torch.zeros(loop.batch_size_per_rank, 3, *run.data.preprocessing.size))
    targets = torch.zeros(loop.batch_size_per_rank, dtype=torch.int64, device=device)
    buffers = [(buffer, buffer.detach().clone()) for buffer in run.bare.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in run.bare.parameters()]
    run.model.train()
    with own_draws(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.autograd.backward(F.cross_entropy(run.model(images).float(), targets))
    with torch.no_grad():
        for buffer, kept in buffers:
            buffer.copy_(kept)
    for parameter, gradient in gradients:
        parameter.grad = gradient
