"""The odd one stands out, by the name of its tensor; what is as it should be is left alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zoo
from zoo.commands.describing import describe
from zoo.commands.description import Note
from zoo.init import INIT_SCHEMES

TINY: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "num_heads": 2, "num_classes": 3}
Plant = Callable[[nn.Module], object]


def make(attention: str = "parameter", init: str | None = None, depth: int = 6, **more: Any) -> nn.Module:
    backbone = more.pop("backbone", "vit_tiny_patch16_224")
    return zoo.create_model(backbone, attention, init=init, seed=0, depth=depth, **(TINY | more))


def doubts(model: nn.Module, init: str | None = None, **how: Any) -> list[Note]:
    return [note for note in describe(model, init, **how).notes if note.kind == "doubt"]


def remarks(model: nn.Module) -> list[str]:
    return [f"{note.attention}: {note.what}" for note in describe(model).notes if note.kind == "remark"]


def scaled(name: str, factor: float) -> Plant:
    def plant(model: nn.Module) -> None:
        model.get_parameter(name).data.mul_(factor)

    return plant


@pytest.mark.parametrize("init", [None, *(scheme for scheme in INIT_SCHEMES if scheme != "normal")])
def test_a_right_draw_raises_no_doubt(variant: str, init: str | None) -> None:
    for seed in range(3):
        model = zoo.create_model("vit_tiny_patch16_224", variant, init=init, seed=seed, depth=6, **TINY)
        assert doubts(model, init) == []


@pytest.mark.parametrize("backbone", ["beit_base_patch16_224", "eva02_tiny_patch14_224"])
def test_a_draw_that_timm_scales_by_depth_raises_no_doubt(backbone: str) -> None:
    assert doubts(make("linear", backbone=backbone, depth=24)) == []


@pytest.mark.parametrize("init", ["torch", "trunc_normal"])
@pytest.mark.parametrize(
    ("name", "factor"),
    [("blocks.3.attn.qkv.to_k", 1.4), ("blocks.0.attn.proj.projection", 0.7), ("blocks.5.attn.qkv.to_v", 24.0)],
)
def test_one_wrong_draw_is_named_against_its_scheme(init: str, name: str, factor: float) -> None:
    model = make(init=init)
    scaled(name, factor)(model)
    found = [note for note in doubts(model, init) if note.what.startswith("std of")]
    assert [f"{note.attention}.{note.what.removeprefix('std of ')}" for note in found] == [name]
    assert found[0].got == pytest.approx(found[0].wanted * factor, rel=0.05)
    assert found[0].yardstick == "the scheme gives"


def test_a_part_of_a_fused_weight_is_named() -> None:
    model = make("linear", "torch")
    model.get_parameter("blocks.2.attn.qkv.weight").data[64:128] *= 2
    assert next(note.what for note in doubts(model, "torch")) == "std of k of qkv.weight"


def test_a_bias_that_should_be_zero_is_named() -> None:
    model = make(init="trunc_normal")
    model.get_parameter("blocks.1.attn.qkv.to_v_bias").data.normal_(std=1e-3)
    (note,) = doubts(model, "trunc_normal")
    assert (note.attention, note.what, note.wanted) == ("blocks.1.attn", "std of qkv.to_v_bias", 0.0)


@pytest.mark.parametrize("block", [0, 2, 5])
@pytest.mark.parametrize("factor", [0.3, 4.0])
def test_without_a_scheme_the_odd_block_is_named_against_its_neighbours(block: int, factor: float) -> None:
    model = make()
    scaled(f"blocks.{block}.attn.qkv.to_v", factor)(model)
    (note,) = doubts(model)
    assert (note.attention, note.what, note.yardstick) == (
        f"blocks.{block}.attn",
        "std of qkv.to_v",
        "the blocks around have",
    )


def test_of_three_blocks_the_odd_one_is_named_and_of_two_neither() -> None:
    for depth, named in ((3, ["blocks.1.attn"]), (2, [])):
        model = make(depth=depth)
        scaled("blocks.1.attn.qkv.to_v", 4)(model)
        assert [note.attention for note in doubts(model)] == named


def test_two_odd_blocks_side_by_side_are_both_named() -> None:
    model = make(depth=8)
    for block in (3, 4):
        scaled(f"blocks.{block}.attn.proj.projection", 10)(model)
    assert [note.attention for note in doubts(model)] == ["blocks.3.attn", "blocks.4.attn"]


@pytest.mark.parametrize(("init", "factor", "what"), [("normal", 1, "attends to one token"), ("torch", 0, "alike")])
def test_attention_that_can_hardly_learn_is_doubted_whatever_the_scheme(init: str, factor: float, what: str) -> None:
    model = make(init=init)
    for block in range(6):
        scaled(f"blocks.{block}.attn.qkv.to_q", factor)(model)
        scaled(f"blocks.{block}.attn.qkv.to_q_bias", factor)(model)
    found = [note for note in doubts(model, init) if "logit std" in note.what]
    assert [note.attention for note in found] == [f"blocks.{block}.attn" for block in range(6)]
    assert all(what in note.what for note in found)


def test_logits_that_are_not_what_the_scheme_gives_are_doubted() -> None:
    model = make(init="torch")
    to_q, to_k = (model.get_parameter(f"blocks.1.attn.qkv.{name}").data for name in ("to_q", "to_k"))
    to_q[:, 1:] = to_q[:, :1]  # of the right spread, and all alike
    to_k[:, 1:] = to_k[:, :1]
    assert ("blocks.1.attn", "logit std") in {(note.attention, note.what) for note in doubts(model, "torch")}


def test_trained_weights_are_held_against_nothing_but_nan() -> None:
    model = make(init="normal")
    scaled("blocks.3.attn.qkv.to_k", 9)(model)
    assert doubts(model, is_trained=True) == []
    model.get_parameter("blocks.3.attn.qkv.to_k").data[0, 0] = float("inf")
    (note,) = doubts(model, is_trained=True)
    assert (note.attention, note.what) == ("blocks.3.attn", "qkv.to_k holds NaN or Inf")


def test_a_strided_parameter_is_doubted() -> None:
    model = make()
    model.get_submodule("blocks.1.attn.proj").projection = nn.Parameter(
        model.get_parameter("blocks.1.attn.proj.projection").detach().t()
    )
    assert [(note.attention, note.what) for note in doubts(model)] == [
        ("blocks.1.attn", "proj.projection is not contiguous")
    ]


def test_what_somebody_must_have_meant_is_a_remark() -> None:
    model = make(qk_norm=True, depth=2)
    zoo.freeze(model, "blocks.0.attn.qkv.to_q")
    zoo.tie(model, "blocks.1.attn.qkv.to_k = blocks.0.attn.qkv.to_k")
    assert doubts(model) == []
    bounded = "q and k are normalised, which bounds the logits"
    assert remarks(model) == [
        "blocks.0.attn: qkv.to_q is frozen",
        "blocks.0.attn: qkv.to_k is one tensor with blocks.1.attn.qkv.to_k",
        f"blocks.0.attn: {bounded}",
        "blocks.1.attn: qkv.to_k is one tensor with blocks.0.attn.qkv.to_k",
        f"blocks.1.attn: {bounded}",
    ]


def test_an_init_that_never_runs_stands_out() -> None:
    class Raw(zoo.Attention):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, variant="parameter", **kwargs)
            for name in ("to_q", "to_k", "to_v"):
                setattr(self.qkv, name, nn.Parameter(torch.randn(64, 64)))

    model = make("linear")
    for block in model.get_submodule("blocks"):
        block.attn = Raw(64, 2, 32)
    assert {note.what for note in doubts(model, "torch")} >= {"std of qkv.to_q", "attends to one token: logit std"}
