"""Cost of the replica and drift checks against reading the weights, and against training; interleaved in one run.

    accelerate launch --config_file accelerate_config.yaml tests/benchmarks/replica_check.py [--rounds 20]

For each model, on every rank at once, the median milliseconds of: `sum`, a plain read of all bytes of its parameters
and buffers by torch; `read`, one hash over all of them, nothing else; `gather`, one collective of 17 bytes, which no
check can be without; `start`, the check before the wrap; `drift`, the check in a training, optimizer state included;
`step`, forward, backward, all-reduce and AdamW. Then the medians of the ratios of one round: start over read, and the
share of a training that checks at the default interval.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
import xxhash
from accelerate import Accelerator
from torch.nn import functional as F

import zoo
from train.build import build_accelerator
from train.config import LoopConfig, WatchConfig
from train.replicas import check_replicas

DIGITS = {"img_size": 8, "patch_size": 2, "embed_dim": 64, "depth": 4, "num_heads": 4, "num_classes": 10}
MODELS: tuple[tuple[str, dict[str, int], int, int, int], ...] = (
    # name, timm_kwargs, image size, images per rank, fewest rounds
    ("vit_tiny_patch16_224", DIGITS, 8, 32, 40),
    ("vit_small_patch16_224", {"num_classes": 1000}, 224, 4, 5),
    ("vit_base_patch16_224", {"num_classes": 1000}, 224, 2, 5),
)
COLUMNS = ("sum", "read", "gather", "start", "drift", "step")


def clock(work: Callable[[], object]) -> float:
    """Return the milliseconds that `work` takes."""
    start = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - start)


def measure(
    accelerator: Accelerator, name: str, kwargs: dict[str, int], size: int, batch: int, fewest: int, rounds: int | None
) -> str:
    """Return a row of the table."""
    bare = zoo.create_model(name, "parameter", seed=0, **kwargs).to(accelerator.device)
    report = check_replicas(bare, accelerator)
    model, optimizer = accelerator.prepare(bare, torch.optim.AdamW(bare.parameters(), fused=True))
    images = torch.randn(batch, 3, size, size, device=accelerator.device)
    labels = torch.zeros(batch, dtype=torch.long, device=accelerator.device)
    tensors = [tensor.detach() for tensor in (*bare.parameters(), *bare.buffers())]

    row = torch.zeros(1, 17, dtype=torch.uint8, device=accelerator.device)

    def read() -> None:
        hasher = xxhash.xxh3_128()
        for tensor in tensors:
            hasher.update(tensor.cpu().numpy().data)

    def step() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        return loss.item()

    works: dict[str, Callable[[], object]] = {
        "sum": lambda: [tensor.sum().item() for tensor in tensors],
        "read": read,
        "gather": lambda: accelerator.gather(row),
        "start": lambda: check_replicas(bare, accelerator),
        "drift": lambda: check_replicas(model, accelerator, buffers="drift", optimizer=optimizer),
        "step": step,
    }
    step()
    times: list[list[float]] = []
    for _ in range(rounds or fewest):
        times.append([])
        for column in COLUMNS:
            accelerator.wait_for_everyone()  # a check waits for the slower rank, which is no part of its cost
            times[-1].append(clock(works[column]))
    medians = [median(column) for column in zip(*times, strict=True)]
    over = median(start / read for _, read, _, start, _, _ in times)
    interval = WatchConfig().drift_every_steps
    share = median(drift / (interval * step + drift) for *_, drift, step in times)
    shown = " ".join(f"{value:9.2f}" for value in medians)
    return f"{name:22} {report.tensors:7} {report.bytes / 1e6:7.1f} {shown} {over:10.2f} {share:9.3%}"


def main() -> None:
    """Print the table on the main process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="of each model; without, 40 for the small and 5 for the others")
    rounds = parser.parse_args().rounds
    accelerator = build_accelerator(LoopConfig())
    lines = [measure(accelerator, *row, rounds) for row in MODELS]
    if accelerator.is_main_process:
        interval = WatchConfig().drift_every_steps
        print(f"{accelerator.num_processes} ranks, {torch.get_num_threads()} thread each; medians, in milliseconds")
        columns = " ".join(f"{column:>9}" for column in COLUMNS)
        print(f"{'model':22} {'tensors':>7} {'MB':>7} {columns} {'start/read':>10} {f'of {interval}':>9}")
        print("\n".join(lines))
    accelerator.end_training()


if __name__ == "__main__":
    main()
