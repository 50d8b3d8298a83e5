"""The paths that only GPUs take: NCCL, bf16 and fp16, torch.compile, channels-last, fused attention, pinned memory."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import zoo
from train.config import AugmentConfig, DataConfig, LoopConfig
from train.data import build_data
from train.loaders import build_train_loader
from zoo.card import Preprocessing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": 3}


@pytest.mark.parametrize(
    "flags",
    [
        ("--loop.mixed_precision", "bf16"),
        ("--loop.mixed_precision", "fp16"),
        ("--loop.mixed_precision", "bf16", "--loop.compile", "true", "--loop.channels_last", "true"),
    ],
)
def test_every_gpu_trains_and_publishes(flags: tuple[str, ...], tmp_path: Path, launch: Any) -> None:
    gpus = torch.cuda.device_count()
    job = launch(tmp_path, "--schedule.epochs", "6", *flags, num_processes=gpus)
    assert job.status == 0, job.err
    assert f"rank {gpus - 1} on cuda:{gpus - 1}" in job.out or (gpus == 1 and "on cuda" in job.out)
    assert "backend nccl" in job.out or gpus == 1
    assert "registry  digits version 1, @champion -> version 1" in job.out


def test_more_processes_than_gpus_is_one_clear_line(tmp_path: Path, launch: Any) -> None:
    job = launch(tmp_path, num_processes=torch.cuda.device_count() + 1)
    assert job.status != 0
    assert "processes were asked for on a machine with" in job.err


@pytest.mark.parametrize("attention", zoo.list_attentions())
def test_a_swap_keeps_logits_and_gradients_on_the_gpu(attention: str) -> None:
    stock = timm.create_model("vit_tiny_patch16_224", **SMALL).cuda().eval()
    swapped = timm.create_model("vit_tiny_patch16_224", **SMALL)
    swapped.load_state_dict(stock.state_dict())
    swapped.cuda().eval()
    zoo.swap_attention(swapped, attention)
    images = torch.randn(4, 3, 32, 32, device="cuda")
    torch.testing.assert_close(swapped(images), stock(images), rtol=0, atol=0)


@pytest.mark.parametrize("attention", zoo.list_attentions())
def test_attention_runs_in_the_flash_kernel(attention: str) -> None:
    model = zoo.create_model("vit_tiny_patch16_224", attention, seed=0, **SMALL).cuda()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), torch.autocast("cuda", dtype=torch.bfloat16):
        model(torch.randn(4, 3, 32, 32, device="cuda")).float().sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def test_batches_wait_in_pinned_memory() -> None:
    preprocessing = Preprocessing(size=(8, 8), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    data = build_data(DataConfig(root="builtin:digits"), AugmentConfig(), preprocessing, seed=0)
    images, labels = next(iter(build_train_loader(data, LoopConfig(), num_workers=0, rank=0, world_size=1)))
    assert images.is_pinned()
    assert labels.is_pinned()


def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path, launch: Any) -> None:
    flags = ("--publish.enabled", "false", "--checkpoint.every_epochs", "1", "--checkpoint.keep", "9")
    whole = launch(tmp_path, *flags, "--schedule.epochs", "2", "--schedule.warmup_epochs", "1", num_processes=1)
    assert whole.status == 0, whole.err
    (last,) = tmp_path.glob("runs/digits/*/checkpoints/step-00000088/state.json")
    first = last.parent.with_name("step-00000044")
    wanted = json.loads(last.read_text())["files"]["model.safetensors"]
    for file in last.parent.iterdir():
        file.unlink()
    last.parent.rmdir()
    resumed = launch(
        tmp_path,
        *flags,
        "--schedule.epochs",
        "2",
        "--schedule.warmup_epochs",
        "1",
        "--resume",
        str(first),
        num_processes=1,
    )
    assert resumed.status == 0, resumed.err
    assert json.loads(last.read_text())["files"]["model.safetensors"] == wanted
