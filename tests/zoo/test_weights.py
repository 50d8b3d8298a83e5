from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import zoo

BuildStock = Callable[..., nn.Module]


def test_every_variant_shows_the_weights_that_stock_shows(build_stock: BuildStock, form: str, variant: str) -> None:
    stock, model = build_stock(form), build_stock(form)
    zoo.swap_attention(model, variant)
    wanted, got = zoo.attention_weights(stock), zoo.attention_weights(model)
    assert list(got) == list(wanted) == ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"]
    for name, tensors in wanted.items():
        assert got[name].keys() == tensors.keys()
        for key, tensor in tensors.items():
            assert torch.equal(got[name][key], tensor), (name, key)


def test_parts_of_the_fused_weight_are_its_rows_in_order(build_stock: BuildStock) -> None:
    model = build_stock()
    fused, bias = (model.get_parameter(f"blocks.1.attn.qkv.{kind}") for kind in ("weight", "bias"))
    shown = zoo.attention_weights(model)["blocks.1.attn"]
    for part, rows in (("q", slice(32)), ("k", slice(32, 64)), ("v", slice(64, 96))):
        assert torch.equal(shown[part], fused[rows])
        assert torch.equal(shown[f"{part}_bias"], bias[rows])
    assert torch.equal(shown["out"], model.get_parameter("blocks.1.attn.proj.weight"))


def test_shapes_are_out_by_in_where_they_differ(build_stock: BuildStock, variant: str) -> None:
    wide, grouped = build_stock("vit_gated_wide"), build_stock("rope_grouped")
    for model in (wide, grouped):
        zoo.swap_attention(model, variant)
    shown = zoo.attention_weights(wide)["blocks.0.attn"]
    assert {key: tuple(t.shape) for key, t in shown.items()} == {
        **dict.fromkeys("qkv", (48, 32)),
        **dict.fromkeys(("q_bias", "k_bias", "v_bias"), (48,)),
        "out": (32, 48),
        "out_bias": (32,),
    }
    assert zoo.attention_weights(grouped)["blocks.1.attn"]["k"].shape == (16, 32)


@pytest.mark.parametrize("key", ["q", "k", "v", "out", "q_bias", "k_bias", "v_bias", "out_bias"])
def test_writing_through_a_detached_view_changes_the_model(
    build_stock: BuildStock, images: Tensor, variant: str, key: str
) -> None:
    model = build_stock()
    zoo.swap_attention(model, variant)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    zoo.attention_weights(model)["blocks.2.attn"][key].detach().fill_(0.25)
    changed = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
    assert len(changed) == 1
    assert changed[0].startswith("blocks.2.attn.")
    assert (zoo.attention_weights(model)["blocks.2.attn"][key] == 0.25).all()
    model(images)


def test_views_lead_gradients_to_the_storage(build_stock: BuildStock, variant: str) -> None:
    model = build_stock()
    zoo.swap_attention(model, variant)
    zoo.attention_weights(model)["blocks.0.attn"]["v"].sum().backward()
    touched = [name for name, p in model.named_parameters() if p.grad is not None]
    assert len(touched) == 1
    assert touched[0].startswith("blocks.0.attn.qkv")


def test_evas_biases_outside_are_shown(build_stock: BuildStock, variant: str) -> None:
    model = build_stock("eva")
    zoo.swap_attention(model, variant)
    shown, attention = zoo.attention_weights(model)["blocks.0.attn"], model.get_submodule("blocks.0.attn")
    assert shown["q_bias"] is attention.q_bias
    assert shown["v_bias"] is attention.v_bias
    assert (shown["k_bias"] == 0).all()
    assert "k_bias" not in zoo.attention_weights(build_stock("eva_separate"))["blocks.0.attn"]
    assert "q_bias" not in zoo.attention_weights(build_stock("eva_no_bias"))["blocks.0.attn"]


def test_a_model_without_attention_shows_nothing() -> None:
    assert zoo.attention_weights(nn.Linear(2, 2)) == {}


def test_a_part_can_be_written_through_a_view_and_read_again(build_stock: BuildStock) -> None:
    model = build_stock()
    weights = zoo.attention_weights(model)["blocks.0.attn"]
    weights["k"].detach().zero_()
    weights["k_bias"].detach().fill_(2.0)
    assert torch.equal(weights["k"][:5], torch.zeros(5, 32))
    assert torch.equal(model.get_parameter("blocks.0.attn.qkv.bias")[32:64], torch.full((32,), 2.0))
