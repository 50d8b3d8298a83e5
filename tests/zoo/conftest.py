"""Tiny timm models of the forms that plain ViT attention takes, and the registered variants."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.layers.attention import Attention
from torch import nn

import zoo
from tests.zoo.trained import bundle_of
from zoo import registry

BuildStock = Callable[..., nn.Module]

TINY: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 3}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit_tiny_patch16_224", {}),
    "vit_no_bias": ("vit_tiny_patch16_224", {"qkv_bias": False, "proj_bias": False}),
    "vit_norms": ("vit_tiny_patch16_224", {"qk_norm": True, "scale_attn_norm": True}),
    "vit_gated_wide": ("vit_tiny_patch16_224", {}),  # its attention is replaced below: no name gives these
    "rope": ("vit_small_patch16_rope_ape_224", {}),
    "rope_grouped": ("vit_base_patch16_sapiens2", {"num_heads": 4, "num_kv_heads": (4, 2, 4)}),
    "eva": ("eva_giant_patch14_224", {}),
    "eva_bias_apart": ("eva_giant_patch14_224", {}),  # qkv_bias_separate is set below
    "eva_no_bias": ("vit_small_patch16_dinov3", {}),
    "eva_separate": ("eva02_base_patch14_224", {"qkv_fused": False, "scale_attn_inner": True}),
}


def _build(form: str = "vit", *, seed: int = 0, **kwargs: Any) -> nn.Module:
    name, extra = FORMS[form]

    def make() -> nn.Module:
        model = timm.create_model(name, **(TINY | extra | kwargs))
        if form == "vit_gated_wide":
            for block in model.blocks:
                block.attn = Attention(32, 2, attn_head_dim=24, qkv_bias=True, gated=True)
        if form == "eva_bias_apart":
            for block in model.blocks:
                block.attn.qkv_bias_separate = True
        return model

    return _build_seeded(make, seed)


def _build_seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make()
        for parameter in model.parameters():  # zeros and ones (biases, layer scales) would hide a mistake
            parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    return model.eval()


@pytest.fixture(scope="session")
def build_stock() -> BuildStock:
    """Build a tiny stock timm model of a form, in eval mode, the same for the same seed; see FORMS for the forms."""
    return _build


@pytest.fixture(scope="session")
def build_seeded() -> Callable[..., nn.Module]:
    """Call what builds a model from a seed, move every parameter of it a little, and give it in eval mode."""
    return _build_seeded


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    """Every form of plain ViT attention in turn."""
    return str(request.param)


@pytest.fixture(params=zoo.list_attentions())
def variant(request: pytest.FixtureRequest) -> str:
    """Every registered variant in turn."""
    return str(request.param)


@pytest.fixture
def images() -> torch.Tensor:
    """Two images, the same in every test."""
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(7))


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """Raw matrices of a tiny model of three classes, saved as a bundle."""
    return bundle_of(tmp_path / "bundle")


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test register variants that are gone when it ends."""
    monkeypatch.setattr(registry, "_ATTENTIONS", dict(registry._ATTENTIONS))


@pytest.fixture
def bytes_of() -> Callable[[nn.Module], dict[str, bytes]]:
    """Give every tensor of a state_dict as bytes, so that two states compare bit for bit, NaN and -0 included."""

    def read(model: nn.Module) -> dict[str, bytes]:
        return {
            name: tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            for name, tensor in model.state_dict().items()
        }

    return read
