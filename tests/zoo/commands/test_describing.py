"""What is stored is told as it is: every variant, every parameter, ties, frozen and strided ones."""

import json
import math
from typing import Any

import pytest
import torch
from timm.layers.attention import Attention
from torch import nn

import zoo
from zoo.commands.describing import describe
from zoo.commands.description import DescribedAttention, StoredParameter
from zoo.errors import UnknownNameError

TINY: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": 3}


def make(
    attention: str = "parameter", init: str | None = None, backbone: str = "vit_tiny_patch16_224", **more: Any
) -> nn.Module:
    return zoo.create_model(backbone, attention, init=init, seed=0, **(TINY | more))


def first(model: nn.Module, init: str | None = None) -> tuple[DescribedAttention, dict[str, StoredParameter]]:
    attention = describe(model, init).attentions[0]
    return attention, {parameter.name: parameter for parameter in attention.parameters}


def test_the_module_is_told(variant: str) -> None:
    told = describe(make(variant)).attentions
    assert [attention.name for attention in told] == ["blocks.0.attn", "blocks.1.attn"]
    assert (told[0].cls, told[0].dim, told[0].num_heads) == ("timm.layers.attention.Attention", 64, 2)
    assert told[0].logit_std is not None
    assert 0 < told[0].entropy <= math.log(65) + 1e-5


def test_every_parameter_of_every_variant_is_told_with_its_parts(variant: str) -> None:
    model = make(variant)
    _, told = first(model)
    stored = dict(model.get_submodule("blocks.0.attn").named_parameters())
    assert {name: parameter.shape for name, parameter in told.items()} == {n: tuple(p.shape) for n, p in stored.items()}
    parts = [part for parameter in told.values() for part in parameter.parts]
    assert sorted(parts) == sorted(f"{part}{bias}" for part in ("q", "k", "v", "out") for bias in ("", "_bias"))


def test_a_fused_weight_is_measured_part_by_part() -> None:
    model = make("linear")
    model.get_parameter("blocks.0.attn.qkv.weight").data[64:128] *= 3  # k
    _, told = first(model)
    spreads = told["qkv.weight"].parts
    assert list(spreads) == ["q", "k", "v"]
    weight = zoo.attention_weights(model)["blocks.0.attn"]["k"]
    assert spreads["k"].std == pytest.approx(weight.std(correction=0).item())
    assert spreads["k"].std / spreads["q"].std == pytest.approx(3, rel=0.1)


@pytest.mark.parametrize(
    ("init", "weight", "out", "bias", "logits"),
    [
        # 1/sqrt(3 * 64) for q of 64 columns; the output takes what the heads give, 48 wide
        ("torch", (3 * 64) ** -0.5, (3 * 48) ** -0.5, (3 * 64) ** -0.5, math.sqrt(1 / 9 * (1 + 1 / 64))),
        ("kaiming_raw", (3 * 48) ** -0.5, (3 * 64) ** -0.5, 0.0, 64 / (3 * 48)),
        ("normal", 1.0, 1.0, 0.0, 64.0),
        ("trunc_normal", 0.02, 0.02, 0.0, 64 * 0.02**2),
    ],
)
def test_what_a_scheme_gives_is_told(init: str, weight: float, out: float, bias: float, logits: float) -> None:
    model = make()
    for block in model.get_submodule("blocks"):
        block.attn = Attention(64, 2, attn_head_dim=24, qkv_bias=True)
    zoo.swap_attention(model, "parameter", init=init, seed=0)
    attention, _ = first(model, init)
    expected = {part: spread.expected_std for part, spread in attention.parts.items()}
    assert [expected[part] for part in ("q", "k", "v")] == pytest.approx([weight] * 3)
    assert expected["out"] == pytest.approx(out)
    assert expected["q_bias"] == pytest.approx(bias)
    assert attention.expected_logit_std == pytest.approx(logits)
    assert attention.logit_std == pytest.approx(logits, rel=0.2)
    for part, spread in attention.parts.items():
        assert spread.std == pytest.approx(spread.expected_std, rel=0.3), part


@pytest.mark.parametrize("init", [None, "timm"])
def test_nothing_is_expected_of_timms_own_draw(init: str | None) -> None:
    attention, told = first(make(init=init), init)
    assert attention.expected_logit_std is None
    assert told["qkv.to_q"].parts["q"].expected_std is None


def test_an_unknown_scheme_is_named() -> None:
    with pytest.raises(UnknownNameError, match="unknown init 'torhc', did you mean 'torch'"):
        describe(make(), "torhc")


def test_frozen_strided_and_tied_parameters_are_told() -> None:
    model = make()
    blocks = [model.get_submodule(f"blocks.{i}.attn") for i in (0, 1)]
    blocks[0].qkv.to_v.requires_grad_(False)
    blocks[0].proj.projection = nn.Parameter(torch.zeros(64, 64).t())
    blocks[0].qkv.to_k = nn.Parameter(torch.zeros(64, 128)[:, ::2])
    zoo.tie(model, "blocks.1.attn.qkv.to_q = blocks.0.attn.qkv.to_q")
    _, told = first(model)
    assert [name for name, parameter in told.items() if not parameter.trainable] == ["qkv.to_v"]
    assert [name for name, parameter in told.items() if not parameter.contiguous] == ["qkv.to_k", "proj.projection"]
    assert told["qkv.to_q"].tied_to == ("blocks.1.attn.qkv.to_q",)
    assert [name for name, parameter in told.items() if parameter.tied_to] == ["qkv.to_q"]


def test_equal_copies_are_no_tie() -> None:
    model = make()
    model.get_parameter("blocks.1.attn.qkv.to_q").data.copy_(model.get_parameter("blocks.0.attn.qkv.to_q"))
    assert first(model)[1]["qkv.to_q"].tied_to == ()


def test_biases_and_norms_outside_of_projections_are_told() -> None:
    model = make(backbone="beit_base_patch16_224")
    _, told = first(model)
    assert list(told["q_bias"].parts) == ["q_bias"]
    assert told["relative_position_bias_table"].parts == {}
    assert "k_bias" not in told  # a buffer of zeros
    attention, told = first(make(qk_norm=True), "torch")
    assert told["q_norm.weight"].parts == {}
    assert (attention.normalised, attention.expected_logit_std) == (True, None)


def test_a_value_that_is_not_finite_has_no_spread_and_json_stays_json() -> None:
    model = make()
    model.get_parameter("blocks.0.attn.qkv.to_k").data[3, 4] = float("nan")
    attention, told = first(model)
    assert told["qkv.to_k"].parts["k"].std is None
    assert attention.logit_std is None
    text = json.dumps(describe(model).to_dict(), allow_nan=False)
    first_of = json.loads(text)["attentions"][0]
    assert first_of["class"] == "timm.layers.attention.Attention"
    assert first_of["parameters"]["qkv.to_k"]["shape"] == [64, 64]


def test_nothing_of_the_model_changes(bytes_of: Any) -> None:
    model = make()
    before, stream = bytes_of(model), torch.get_rng_state()
    describe(model, "torch")
    assert bytes_of(model) == before
    assert torch.equal(torch.get_rng_state(), stream)


def test_a_model_without_known_attention_has_nothing_to_tell() -> None:
    told = describe(nn.Linear(2, 2))
    assert (told.attentions, told.notes) == ((), ())


def test_half_precision_and_meta_models_are_told() -> None:
    assert first(make().half())[1]["qkv.to_q"].dtype == "float16"
    assert first(make().to("meta"))[1]["qkv.to_q"].parts["q"].std is None
