"""A training small enough for a test: twelve 8 x 8 images, a ViT of one block. For the tests and for their ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from train.build import build_accelerator, build_run, wrap
from train.config import TrainConfig
from train.load import set_path, validate
from train.run import Run
from train.tracking import Tracker

BACKBONE = "vit_tiny_patch16_224"


def write_images(root: Path, train: int = 4, val: int = 3, classes: tuple[str, ...] = ("ash", "elm", "oak")) -> Path:
    """Write ROOT/train/CLASS and ROOT/val/CLASS, that many random 8 x 8 images for each class."""
    draws = np.random.default_rng(0)
    for part, count in (("train", train), ("val", val)):
        for name in classes:
            folder = root / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.fromarray(draws.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    return root


def tiny_config(root: Path | str, **fields: Any) -> TrainConfig:
    """Return the tiny training's config on the images in `root`; `fields` by dotted name, `__` for the dot."""
    folder = Path(root).absolute().parent
    merged: dict[str, Any] = {
        "name": "tiny",
        "output_dir": str(folder / "runs"),
        "model": {
            "backbone": BACKBONE,
            "attention": "parameter",
            "timm_kwargs": {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2},
        },
        "data": {"root": str(root)},
        "optimizer": {"lr": 1e-2},
        "schedule": {"epochs": 2, "warmup_epochs": 1},
        "loop": {"batch_size_per_rank": 2},
        "log": {"every_steps": 1, "progress": False},
        "tracking": {"uri": f"sqlite:///{folder}/mlflow.db"},
        "publish": {"engine": "eager"},  # exporting to ONNX takes seconds
    }
    for name, value in fields.items():
        set_path(merged, name.replace("__", "."), value)
    return validate(merged)


def build_tiny(config: TrainConfig, *, wrapped: bool = True) -> Run:
    """Build a run that tracks nothing, in the folder RUN_DIR/test, wrapped and ready for its first step."""
    run = build_run(config, build_accelerator(config.loop), Tracker(config.tracking, main=False))
    run.folder = config.run_dir / "test"
    if wrapped:
        wrap(run)
    return run


def weights(run: Run) -> dict[str, Tensor]:
    """Return a copy of the weights."""
    return {name: tensor.detach().clone() for name, tensor in run.bare.state_dict().items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Whether two dicts of tensors hold the same bits."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@contextmanager
def swapped(owner: object, name: str, value: object) -> Iterator[None]:
    """Set an attribute for a while; for ranks, which have no monkeypatch."""
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)
