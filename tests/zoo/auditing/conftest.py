"""The models that more than one of the audit's tests train."""

import pytest
import timm
import torch
from torch import nn

import zoo


@pytest.fixture
def vit() -> nn.Module:
    """A tiny stock model."""
    torch.manual_seed(0)
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=3
    )


@pytest.fixture
def model() -> nn.Module:
    """A tiny model of raw parameters."""
    torch.manual_seed(0)
    return zoo.create_model(
        "vit_tiny_patch16_224",
        "parameter",
        img_size=32,
        patch_size=8,
        embed_dim=32,
        depth=2,
        num_heads=2,
        num_classes=3,
        seed=0,
    )
