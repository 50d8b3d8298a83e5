"""The audit, freezing and DDP together, on two real ranks."""

from typing import Any

import pytest
import timm
import torch
from accelerate import Accelerator
from torch import nn

import zoo
from train.replicas import check_replicas
from zoo.errors import ZooError
from zoo.freezing import check_trainable


def build() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=3
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, accelerator: Accelerator, steps: int = 2) -> None:
    generator = torch.Generator().manual_seed(accelerator.process_index)
    for _ in range(steps):
        images = torch.randn(4, 3, 32, 32, generator=generator)
        accelerator.backward(nn.functional.cross_entropy(model(images), torch.tensor([0, 1, 2, 0])))
        optimizer.step()
        optimizer.zero_grad()


def train_half_frozen(accelerator: Accelerator) -> dict[str, object]:
    model = build()
    frozen = zoo.freeze(model, ["patch_embed", "blocks.0"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wrapped, prepared = accelerator.prepare(model, optimizer)
    before = zoo.snapshot(wrapped, prepared)
    train(wrapped, prepared, accelerator)
    report = zoo.audit(wrapped, prepared, before=before)
    return {
        "wrapper": type(wrapped).__name__,
        "frozen": len(frozen),
        "steps": before.steps,
        "found": [str(finding) for finding in (*report.errors, *report.findings) if finding.severity != "note"],
        "replicas": str(check_replicas(wrapped, accelerator, when="after step 2")).partition(",")[0],
    }


def train_with_an_unused_head(accelerator: Accelerator) -> dict[str, object]:
    model = build()
    model.extra_head = nn.Linear(32, 5)
    report = zoo.audit(model, batch=torch.randn(2, 3, 32, 32))
    wrapped, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    try:
        train(wrapped, optimizer, accelerator)
        died = ""
    except RuntimeError as error:
        died = str(error).partition(".")[0]  # what follows names the rank
    return {"found": [finding.tensor for finding in report.errors], "died": died}


def train_the_inner_module(accelerator: Accelerator) -> str:
    model = build()
    wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train(accelerator.unwrap_model(wrapped), optimizer, accelerator, steps=1)
    try:
        return str(check_replicas(wrapped, accelerator, when="after step 1", buffers="none"))
    except Exception as error:
        return str(error)


def freeze_everything(accelerator: Accelerator) -> str:
    model = build().to(accelerator.device)
    zoo.freeze(model, "*")
    try:
        check_trainable(model)
    except ZooError as error:
        return str(error)
    return "passed"


def run_all(accelerator: Accelerator) -> dict[str, object]:
    workers = (train_half_frozen, train_the_inner_module, freeze_everything, train_with_an_unused_head)
    return {worker.__name__: worker(accelerator) for worker in workers}


@pytest.fixture(scope="module")
def told(run_ranks) -> dict[str, Any]:
    """What two ranks made of each case; both say the same."""
    first, second = run_ranks(run_all)
    assert not first.error, first.traceback
    assert first.value == second.value
    return first.value


@pytest.mark.slow
def test_freeze_before_prepare_needs_no_flag_and_audits_clean(told) -> None:  # reported: pytorch/pytorch#43259
    assert told["train_half_frozen"] == {
        "wrapper": "DistributedDataParallel",
        "frozen": 14,
        "steps": 2,
        "found": [],
        "replicas": "replica check after step 2: 2 ranks are equal",
    }


@pytest.mark.slow
def test_unused_head_on_which_ddp_dies_is_named_before_the_first_step(told) -> None:  # reported: pytorch/pytorch#43259
    assert told["train_with_an_unused_head"] == {
        "found": ["extra_head.weight", "extra_head.bias"],
        "died": "Expected to have finished reduction in the prior iteration before starting a new one",
    }


@pytest.mark.slow
def test_calling_the_inner_module_is_caught_after_the_first_step(told) -> None:
    assert "replica check after step 1: rank 1 of 2 differs from rank 0" in told["train_the_inner_module"]


@pytest.mark.slow
def test_everything_frozen_reads_alike_on_one_rank_and_on_two(told) -> None:
    assert told["freeze_everything"] == freeze_everything(Accelerator(cpu=True))
    assert told["freeze_everything"].startswith("no trainable parameters: all 32 are frozen")
