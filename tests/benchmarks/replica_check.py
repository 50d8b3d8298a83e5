"""Cost of the replica check against one training step of the same model, interleaved in one run.

    accelerate launch --config_file accelerate_config.yaml tests/benchmarks/replica_check.py [--rounds 20]

Prints a table: the median milliseconds of the check and of a step (forward, backward, all-reduce, AdamW), and their
ratio.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from accelerate import Accelerator
from torch.nn import functional as F

import zoo
from train.build import build_accelerator
from train.config import LoopConfig
from train.replicas import check_replicas

DIGITS = {"img_size": 8, "patch_size": 2, "embed_dim": 64, "depth": 4, "num_heads": 4, "num_classes": 10}
MODELS = (  # name, timm_kwargs, image size, images per rank
    ("vit_tiny_patch16_224", DIGITS, 8, 32),
    ("vit_small_patch16_224", {"num_classes": 1000}, 224, 4),
)


def clock(work: Callable[[], object]) -> float:
    """Return the milliseconds that `work` takes."""
    start = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - start)


def measure(accelerator: Accelerator, name: str, kwargs: dict[str, int], size: int, batch: int, rounds: int) -> str:
    """Return a row of the table."""
    bare = zoo.create_model(name, "parameter", seed=0, **kwargs)
    report = check_replicas(bare, accelerator)
    model, optimizer = accelerator.prepare(bare, torch.optim.AdamW(bare.parameters(), fused=True))
    images = torch.randn(batch, 3, size, size, device=accelerator.device)
    labels = torch.zeros(batch, dtype=torch.long, device=accelerator.device)

    def step() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        return loss.item()

    step()
    times = [(clock(lambda: check_replicas(model, accelerator)), clock(step)) for _ in range(rounds)]
    check, train = (median(column) for column in zip(*times, strict=True))
    ratio = median(a / b for a, b in times)
    return f"{name:24} {report.tensors:8} {report.bytes / 1e6:9.1f} {check:10.2f} {train:10.2f} {ratio:8.3f}"


def main() -> None:
    """Print the table on the main process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    accelerator = build_accelerator(LoopConfig())
    lines = [measure(accelerator, *row, rounds) for row in MODELS]
    if accelerator.is_main_process:
        print(f"{accelerator.num_processes} ranks, {torch.get_num_threads()} thread each, medians of {rounds}")
        print(f"{'model':24} {'tensors':>8} {'MB':>9} {'check ms':>10} {'step ms':>10} {'ratio':>8}")
        print("\n".join(lines))
    accelerator.end_training()


if __name__ == "__main__":
    main()
