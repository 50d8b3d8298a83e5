from collections.abc import Callable

import pytest
import timm
import torch
from timm.layers.attention import Attention, AttentionRope
from timm.models.efficientformer import Attention as EfficientFormerAttention
from timm.models.gcvit import WindowAttentionGlobal
from timm.models.levit import Attention as LevitAttention
from timm.models.maxxvit import AttentionCl
from timm.models.vision_transformer import ParallelScalingBlock
from torch import nn

import zoo
from zoo.errors import SwapError
from zoo.layout import Layout
from zoo.projections import ParameterProjection
from zoo.slots import find_places, find_row, iter_attentions, iter_claims, iter_unmapped, why_not
from zoo.timm_map import ROWS, AttentionRow, Slot

BuildStock = Callable[..., nn.Module]


class BlockAttention(nn.Module):
    """A block that is called after the attention that it may hold."""


def layouts(attention: nn.Module) -> dict[str, Layout]:
    return {place.slot.child: place.layout for place in find_places(attention)}


@pytest.mark.parametrize(
    ("attention", "wanted"),
    [
        (Attention(32, 4), {"qkv": Layout({"q": 32, "k": 32, "v": 32}), "proj": Layout({"out": 32})}),
        (
            AttentionRope(32, 4, qkv_fused=False, num_kv_heads=2),
            {child: Layout({child[0]: size}) for child, size in (("q_proj", 32), ("k_proj", 16), ("v_proj", 16))}
            | {"proj": Layout({"out": 32})},
        ),
        (
            EfficientFormerAttention(16, key_dim=4, num_heads=2, attn_ratio=3),
            {"qkv": Layout({"q": 8, "k": 8, "v": 24}, num_heads=2), "proj": Layout({"out": 16})},
        ),
        (
            LevitAttention(16, key_dim=4, num_heads=2, attn_ratio=2, resolution=4),
            {"qkv.linear": Layout({"q": 8, "k": 8, "v": 16}, num_heads=2), "proj.ln.linear": Layout({"out": 16})},
        ),
        (
            AttentionCl(16, dim_head=8, head_first=True),
            {"qkv": Layout({"q": 16, "k": 16, "v": 16}, num_heads=2), "proj": Layout({"out": 16})},
        ),
        (
            AttentionCl(16, dim_head=8, head_first=False),
            {"qkv": Layout({"q": 16, "k": 16, "v": 16}), "proj": Layout({"out": 16})},
        ),
        (
            WindowAttentionGlobal(16, 2, window_size=2, use_global=True),
            {"qkv": Layout({"k": 16, "v": 16}), "proj": Layout({"out": 16})},
        ),
        (
            WindowAttentionGlobal(16, 2, window_size=2, use_global=False),
            {"qkv": Layout({"q": 16, "k": 16, "v": 16}), "proj": Layout({"out": 16})},
        ),
        (
            ParallelScalingBlock(16, 2, mlp_ratio=2),
            {"in_proj": Layout({"mlp": 32, "q": 16, "k": 16, "v": 16}), "attn_out_proj": Layout({"out": 16})},
        ),
        (ParallelScalingBlock(16, 2, fuse_out_proj=True), {"in_proj": Layout({"mlp": 64, "q": 16, "k": 16, "v": 16})}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_layouts_are_read_off_the_module(attention: nn.Module, wanted: dict[str, Layout]) -> None:
    assert layouts(attention) == wanted
    for variant in zoo.list_attentions():
        zoo.swap_attention(attention, variant)
        assert layouts(attention) == wanted


def test_places_carry_their_full_names(build_stock: BuildStock) -> None:
    model = build_stock("rope_grouped")
    attention = model.get_submodule("blocks.1.attn")
    names = [place.name for place in find_places(attention, "blocks.1.attn")]
    assert names == [f"blocks.1.attn.{child}" for child in ("q_proj", "k_proj", "v_proj", "proj")]
    assert [place.name for place in find_places(attention)] == ["q_proj", "k_proj", "v_proj", "proj"]
    place = find_places(attention)[1]
    replacement = nn.Linear(1, 1)
    place.put(replacement)
    assert place.child is attention.k_proj is replacement


def test_a_place_below_a_child_of_the_attention_is_put_there() -> None:
    attention = LevitAttention(16, key_dim=4, num_heads=2, attn_ratio=2, resolution=4)
    find_places(attention)[0].put(replacement := nn.Linear(16, 32))
    assert attention.qkv.linear is replacement


def test_a_convolution_holds_no_matrix() -> None:
    attention = LevitAttention(16, key_dim=4, num_heads=2, attn_ratio=2, resolution=4, use_conv=True)
    assert [place.holds_matrix for place in find_places(attention)] == [False, False]
    with pytest.raises(SwapError, match=r"qkv\.linear: cannot swap Conv2d, only nn\.Linear; nothing was changed"):
        zoo.swap_attention(attention, "parameter")


@pytest.mark.parametrize("gone", ["qkv", "proj"])
def test_a_child_that_timm_renamed_is_named(gone: str) -> None:
    attention = Attention(16, 2)
    attention.renamed = attention._modules.pop(gone)
    part = {"qkv": "k", "proj": "out"}[gone]
    message = f"Attention has no {gone} for {part}, as its row in zoo.timm_map says"
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({"attn": attention})])})
    with pytest.raises(SwapError, match=rf"^blocks\.0\.attn: {message}"):
        zoo.swap_attention(model, "separate")
    with pytest.raises(SwapError, match=message):
        zoo.attention_weights(model)
    assert type(attention.renamed) is nn.Linear


def test_a_child_that_timm_left_empty_is_no_place() -> None:
    assert [place.slot.child for place in find_places(zoo.Attention(16, 1, 16))] == ["qkv"]
    assert [place.slot.child for place in find_places(AttentionRope(16, 2))] == ["qkv", "proj"]


@pytest.mark.parametrize(
    ("slot", "message"),
    [
        (Slot("qkv", ("q", "k", "v"), ("head_dim", "head_dim")), r"a\.qkv: 48 columns do not hold q, k, v of widths"),
        (Slot("qkv", ("q", "k", "v", "g", "h")), r"a\.qkv: 48 columns do not hold q, k, v, g, h of widths \[1, 1, 1"),
    ],
)
def test_widths_that_do_not_fit_are_named(monkeypatch: pytest.MonkeyPatch, slot: Slot, message: str) -> None:
    monkeypatch.setitem(ROWS, "timm.layers.attention.Attention", AttentionRow((slot,)))
    model = nn.ModuleDict({"a": Attention(16, 2)})
    with pytest.raises(SwapError, match=message):
        zoo.swap_attention(model, "separate")
    assert type(model["a"].qkv) is nn.Linear


def test_a_row_counts_as_soon_as_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    own = type("OwnAttention", (nn.Module,), {})()
    own.to_q = nn.Linear(4, 4)
    model = nn.ModuleDict({"own": own})
    assert [name for name, _ in iter_unmapped(model)] == ["own"]
    assert why_not(own) == "no row in zoo.timm_map"
    name = f"{type(own).__module__}.OwnAttention"
    with monkeypatch.context() as context:
        context.setitem(ROWS, name, row := AttentionRow((Slot("to_q", ("q",)),)))
        assert find_row(own) is row
        assert [name for name, _ in iter_attentions(model)] == ["own"]
        zoo.swap_attention(model, "parameter")
        assert type(own.to_q) is ParameterProjection
    assert [name for name, _ in iter_unmapped(model)] == ["own"]


def test_a_class_that_derives_from_timms_has_no_row_of_its_own_right() -> None:
    derived = type("Derived", (Attention,), {})(16, 2)
    assert [name for name, _ in iter_attentions(nn.Sequential(derived))] == []
    assert [name for name, _ in iter_unmapped(nn.Sequential(derived))] == ["0"]
    ours = type("Derived", (zoo.Attention,), {})(16, 2, 8)
    assert [name for name, _ in iter_attentions(nn.Sequential(ours))] == ["0"]


def test_a_block_named_after_its_attention_is_no_attention() -> None:
    block = BlockAttention()
    block.attn = Attention(16, 2)
    assert [name for name, _ in iter_claims(nn.Sequential(block))] == ["0.attn"]
    assert list(iter_unmapped(nn.Sequential(block))) == []
    assert [name for name, _ in iter_unmapped(nn.Sequential(BlockAttention()))] == ["0"]


def test_claims_come_in_the_models_order() -> None:
    with torch.device("meta"):
        model = timm.create_model("coatnet_0_rw_224")
    names = [name for name, _ in iter_claims(model)]
    assert names == [name for name, _ in model.named_modules() if name in set(names)]
    assert {type(module).__name__ for _, module in iter_claims(model)} == {"Attention2d"}
