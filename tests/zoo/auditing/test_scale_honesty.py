"""Is the measured scale the one that attention has? Held against the logits that forward hands to softmax."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import timm
import torch
from timm.layers.attention import Attention, AttentionRope
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import zoo
from zoo.auditing.scale import _DOT_PRODUCT, _is_dot_product, measure_scale
from zoo.slots import qualified_name

THIN: dict[str, Any] = {"embed_dim": 32, "depth": 2, "num_heads": 2}
SMALL: dict[str, Any] = {"img_size": 32, **THIN}
STAGES: dict[str, Any] = {"embed_dims": (16, 32, 32, 32), "depths": (1, 2, 1, 1), "num_heads": (1, 2, 2, 2)}
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "vit_tiny_patch16_224": (32, {**SMALL, "patch_size": 8}),
    "vit_small_patch16_rope_224": (32, SMALL),
    "vit_base_patch16_sapiens2": (32, {**SMALL, "num_kv_heads": (2, 1)}),
    "vit_base_patch16_xp_224": (32, {**SMALL, "patch_size": 8}),
    "vit_relpos_small_patch16_224": (32, SMALL),
    "vit_small_patch16_dinov3": (32, SMALL),
    "samvit_base_patch16": (
        64,
        {**SMALL, "img_size": 64, "patch_size": 8, "global_attn_indexes": (1,), "window_size": 4},
    ),
    "beit_base_patch16_224": (32, SMALL),
    "cait_xxs24_224": (32, SMALL),
    "convit_tiny": (32, {**SMALL, "local_up_to_layer": 1}),
    "crossvit_tiny_240": (240, {}),
    "davit_tiny": (64, {**STAGES, "num_heads": (2, 2, 2, 2)}),
    "efficientformer_l1": (224, {}),
    "fastvit_sa12": (64, {}),
    "gcvit_xxtiny": (64, {"img_size": 64}),
    "hiera_tiny_224": (64, {"img_size": 64, "embed_dim": 16, "num_heads": 1, "stages": (1, 1, 2, 1)}),
    "sam2_hiera_tiny": (64, {"embed_dim": 16}),
    "maxvit_rmlp_pico_rw_256": (64, {"img_size": 64}),
    "caformer_s18": (64, {}),
    "nest_tiny": (64, {"img_size": 64}),
    "nextvit_small": (64, {}),
    "pvt_v2_b0": (64, {"depths": (1, 1, 1, 1)}),
    "swin_tiny_patch4_window7_224": (
        64,
        {"img_size": 64, "window_size": 4, "embed_dim": 16, "depths": (1, 2), "num_heads": (2, 2)},
    ),
    "tiny_vit_5m_224": (64, {}),
    "tnt_s_legacy_patch16_224": (
        32,
        {"img_size": 32, "embed_dim": 32, "inner_dim": 16, "depth": 2, "num_heads_inner": 2, "num_heads_outer": 2},
    ),
    "twins_svt_small": (224, STAGES),
    "volo_d1_224": (64, {"img_size": 64}),
}
# Attention of other kinds: a row for it would lie.
OTHERS: dict[str, tuple[int, dict[str, Any]]] = {
    "swinv2_tiny_window8_256": MODELS["swin_tiny_patch4_window7_224"],
    "swinv2_cr_tiny_224": MODELS["swin_tiny_patch4_window7_224"],
    "xcit_nano_12_p16_224": (32, SMALL),
    "vit_dlittle_patch16_reg1_gap_256": (32, {**SMALL, "patch_size": 8}),
    "levit_128s": (64, {"img_size": 64, "embed_dim": (32, 32, 32), "depth": (1, 1, 1), "num_heads": (2, 2, 2)}),
    "coat_lite_tiny": (64, {"img_size": 64}),
    "mvitv2_tiny": (64, {"img_size": 64}),
    "edgenext_xx_small": (64, {}),
    "swiftformer_xs": (64, {"img_size": 64}),
    "gemma4_vit_167m": (48, {**THIN, "img_size": 48}),
}
PROJECTIONS = ("q", "k", "qk", "qkv", "kv", "q_proj", "k_proj", "wq", "wk", "in_proj")


class Logits(TorchFunctionMode):
    """Keeps what softmax gets, without masks and position biases where scaled_dot_product_attention adds them."""

    def __init__(self) -> None:
        super().__init__()
        self.caught: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            q, k = args[0], args[1].repeat_interleave(args[0].shape[-3] // args[1].shape[-3], -3)
            self.caught.append(q @ k.mT * (kwargs.get("scale") or q.shape[-1] ** -0.5))
        elif getattr(func, "__name__", "") == "softmax":
            self.caught.append(args[0])
        return func(*args, **kwargs)

    def std(self) -> float:
        """Spread over the keys, root mean square over all else: what a key's bias adds alike, softmax does not see."""
        (logits,) = self.caught
        return float(logits.var(-1).mean().sqrt())


@contextmanager
def normal_tokens(attention: nn.Module) -> Iterator[Logits]:
    """Give an attention module N(0, I) tokens in the place of its input, and catch its logits."""
    logits = Logits()

    def enter(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        logits.__enter__()
        return torch.randn_like(inputs[0]), *inputs[1:]

    def leave(*_: Any) -> None:
        logits.__exit__(None, None, None)

    handles = attention.register_forward_pre_hook(enter), attention.register_forward_hook(leave)
    yield logits
    for handle in handles:
        handle.remove()


@torch.no_grad()
def build(name: str, options: dict[str, Any]) -> nn.Module:
    """Build a model whose content logits outweigh the biases by position, and whose biases are not zero."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=3, **options).eval()
    for path, parameter in model.named_parameters():
        if any(part in PROJECTIONS for part in path.split(".")):
            parameter.mul_(20) if parameter.ndim > 1 else parameter.normal_()
    return model


def classes(model: nn.Module, rows: Any) -> set[str]:
    return {qualified_name(model.get_submodule(row.name)) for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_measured_spread_is_that_of_the_logits_in_forward(name) -> None:
    size, options = MODELS[name]
    model = build(name, options)
    rows = measure_scale(model)
    first = {qualified_name(model.get_submodule(row.name)): row for row in reversed(rows)}
    assert first
    for row in first.values():
        with normal_tokens(model.get_submodule(row.name)) as logits:
            model(torch.randn(16, 3, size, size))
        # a few hundred tokens, in heads of few dimensions; what no row allows is another factor or another kind
        assert row.logit_std == pytest.approx(logits.std(), rel=0.2), row.name


@pytest.mark.slow
def test_every_measured_class_is_held_against_its_logits() -> None:
    seen = {"zoo.attention.Attention"}  # held in test_scale.py
    for name, (_, options) in MODELS.items():
        model = build(name, options)
        seen |= classes(model, measure_scale(model))
    assert seen == set(_DOT_PRODUCT)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_attention_of_another_kind_has_no_row(name) -> None:
    model = build(name, OTHERS[name][1])
    assert zoo.attention_weights(model)
    assert classes(model, measure_scale(model)) <= {"timm.models.cait.ClassAttn"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pooled"),
    [
        ("hiera_tiny_224", lambda attention: attention.q_stride > 1),
        ("sam2_hiera_tiny", lambda attention: attention.q_pool is not None),
        ("nextvit_small", lambda attention: attention.sr_ratio > 1),
    ],
)
def test_attention_that_pools_its_queries_or_keys_has_no_row(name, pooled: Callable[[nn.Module], bool]) -> None:
    model = build(name, MODELS[name][1])
    measured = {row.name for row in measure_scale(model)}
    told = {path: pooled(model.get_submodule(path)) for path in zoo.attention_weights(model)}
    assert set(told.values()) == {True, False}
    assert measured == {path for path, is_pooled in told.items() if not is_pooled}


@pytest.mark.parametrize(
    "attention",
    [
        lambda: Attention(32, 2, qk_norm=True, norm_layer=nn.LayerNorm),
        lambda: Attention(32, 4, qkv_bias=True, attn_head_dim=24),
        lambda: AttentionRope(64, 8, qkv_fused=False, num_kv_heads=2),
        lambda: AttentionRope(64, 8, qkv_fused=False, num_kv_heads=2, qk_norm=True, norm_layer=nn.LayerNorm),
        lambda: zoo.Attention(32, 4, 16, variant="parameter"),
    ],
    ids=["qk_norm", "wide heads", "grouped", "grouped and normalised", "own"],
)
@torch.no_grad()
def test_heads_of_other_widths_and_normalised_ones_are_measured_as_they_are(attention) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"attn": attention().eval()})
    for parameter in model.parameters():
        parameter.mul_(3) if parameter.ndim > 1 else parameter.add_(torch.randn_like(parameter))
    (row,) = measure_scale(model)
    with normal_tokens(model["attn"]) as logits:
        model["attn"](torch.empty(4, 65, row.dim))
    assert row.logit_std == pytest.approx(logits.std(), rel=0.15)


def test_subclass_with_a_forward_of_its_own_is_another_kind() -> None:
    class Same(Attention):
        pass

    class Squared(Attention):
        def forward(self, x: Tensor, *_: Any) -> Tensor:
            return super().forward(x).square()

    class Uniform(zoo.Attention):
        def attend(self, _q: Tensor, _k: Tensor, v: Tensor, **_: Any) -> Tensor:
            return v

    assert _is_dot_product(Same(32, 2))
    assert not _is_dot_product(Squared(32, 2))
    assert _is_dot_product(zoo.Attention(32, 2))
    assert not _is_dot_product(Uniform(32, 2))


def test_heads_that_do_not_divide_the_width_have_no_row() -> None:
    model = nn.ModuleDict({"attn": Attention(32, 4)})
    model["attn"].num_heads = 5
    assert measure_scale(model) == ()


def test_logits_scaled_by_another_factor_have_no_row() -> None:  # where timm fuses, it would not read the factor
    model = nn.ModuleDict({"attn": Attention(32, 4)})
    assert len(measure_scale(model)) == 1
    model["attn"].scale = 0.5
    assert measure_scale(model) == ()


def test_weights_that_are_not_finite_have_no_row() -> None:
    model = nn.ModuleDict({"attn": Attention(32, 4)})
    nn.init.constant_(model["attn"].qkv.weight, float("nan"))
    assert measure_scale(model) == ()
