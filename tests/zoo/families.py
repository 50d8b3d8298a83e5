"""Tiny models of timm's families, swapped and stock side by side: what a neighbour does to one it does to the other."""

from collections.abc import Callable
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import zoo
from zoo.projections import KINDS, Projection

_VIT: dict[str, Any] = {"embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 3}
_PLAIN = _VIT | {"img_size": 32, "patch_size": 8}
_WINDOWS = {"img_size": 32, "patch_size": 2, "embed_dim": 16, "depths": (1, 1), "num_heads": (2, 2), "window_size": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit_tiny_patch16_224", _PLAIN),
    "rope": ("vit_small_patch16_rope_ape_224", _PLAIN),
    "eva": ("eva_giant_patch14_224", _PLAIN),  # one product over qkv.weight, called by timm itself
    "eva_apart": ("eva02_base_patch14_224", _PLAIN | {"qkv_fused": False, "scale_attn_inner": True}),
    "beit": ("beit_base_patch16_224", _PLAIN),
    "relpos": ("vit_relpos_small_patch16_224", _PLAIN),
    "swin": ("swin_tiny_patch4_window7_224", _WINDOWS | {"num_classes": 3}),
    "swin_v2": ("swinv2_tiny_window8_256", _WINDOWS | {"num_classes": 3}),
    "naflex": ("naflexvit_base_patch16_gap", _VIT | {"patch_size": 8}),
    "hybrid": ("vit_tiny_r_s16_p8_224", _VIT | {"img_size": 32}),
    "levit": ("levit_128s", {"img_size": 64, "num_classes": 3}),  # q, k and v head by head, BatchNorm inside
}
VARIANTS = ("separate", "parameter")
SLOW = tuple(family for family in FAMILIES if family not in ("vit", "swin_v2"))  # all but two kinds, by their number
# LeViT's last stage has a single token: below 17 rows the matrix library sums x @ W in another order
TOLERANCES = {"levit": 1e-6}
Use = Callable[[nn.Module], Any]


def build_stock(family: str, *, noise: float = 0.02, **kwargs: Any) -> nn.Module:
    """Build a family's stock model in eval mode, of the same weights every time; `noise` moves zeros and ones."""
    name, extra = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = timm.create_model(name, **(extra | kwargs))
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=noise)
    return model.eval()


def build_pair(family: str, variant: str, **kwargs: Any) -> tuple[nn.Module, nn.Module]:
    """Return a swapped model and the stock one that it was."""
    ours = build_stock(family, **kwargs)
    zoo.swap_attention(ours, variant)
    return ours, build_stock(family, **kwargs)


def build_images(family: str, batch: int = 2, *, scale: int = 1) -> Tensor:
    """Return images of the family's size, (B, 3, height, width), the same every time."""
    size = FAMILIES[family][1].get("img_size", 32) * scale
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(7))


def check_alike(family: str, variant: str, use: Use, *, tolerance: float | None = None) -> tuple[nn.Module, nn.Module]:
    """Use a swapped and a stock model alike, each from one seed, and compare all that comes back; return both.

    Tensors must agree within `tolerance` (that of the family if None; 0 is bit for bit), and anything else be equal.
    """
    pair = build_pair(family, variant)
    allowed = TOLERANCES.get(family, 0.0) if tolerance is None else tolerance
    results = []
    for model in pair:
        torch.manual_seed(5)
        results.append(tree_leaves(use(model)))
    assert len(results[0]) == len(results[1]) > 0
    for got, wanted in zip(*results, strict=True):
        if isinstance(wanted, Tensor):
            assert torch.isfinite(wanted).all()
            torch.testing.assert_close(got, wanted, rtol=0, atol=allowed, msg=lambda text: f"{family}: {text}")
        else:
            assert got == wanted
    return pair


def as_stock(model: nn.Module, read: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor]:
    """Return what `read` says of every parameter (its values, its gradient), by stock timm's names, in its shapes."""
    found: dict[str, Tensor] = {}
    projections = {name: module for name, module in model.named_modules() if isinstance(module, Projection)}
    for name, module in projections.items():
        for kind in KINDS:
            stored = {part: module.part_parameter(part, kind) for part in module.layout.parts}
            values = {part: read(parameter) for part, parameter in stored.items() if parameter is not None}
            pieces = {part: value for part, value in values.items() if value is not None}
            if pieces and kind == "weight" and module.transposed:
                pieces = {part: value.t() for part, value in pieces.items()}
            if pieces:
                found[f"{name}.{kind}"] = module.layout.join(pieces)
    inside = tuple(f"{name}." for name in projections)
    for name, parameter in model.named_parameters():
        value = read(parameter)
        if value is not None and not name.startswith(inside):
            found[name] = value
    return dict(sorted(found.items()))
