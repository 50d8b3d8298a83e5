"""Every number of a row against a plain reference, and the shapes for which there is no row."""

import math
from collections.abc import Callable

import pytest
import torch
from timm.layers.attention import Attention, AttentionRope
from torch import Tensor, nn

import zoo
from zoo.auditing.scale import measure_scale


def plain() -> nn.Module:
    return zoo.Attention(32, 4, 8, qkv_bias=True)


def grouped() -> nn.Module:
    return AttentionRope(32, 4, qkv_bias=True, qkv_fused=False, num_kv_heads=2)


@torch.no_grad()
def build(make: Callable[[], nn.Module]) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a model of one attention whose heads differ in scale, and its weights."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"attn": make()})
    weights = zoo.attention_weights(model)["attn"]
    for part in ("q", "k"):
        for head, rows in enumerate(weights[part].split(8)):
            rows.mul_(2.0 ** (head + 1))
        weights[f"{part}_bias"].normal_(std=30)
    return model, weights


def heads(weights: dict[str, Tensor], part: str, x: Tensor) -> Tensor:
    """Return queries or keys, (H, N, D), a grouped key by each query that shares it."""
    split = (x @ weights[part].T + weights[f"{part}_bias"]).unflatten(-1, (-1, 8)).transpose(0, 1)
    return torch.stack([split[head * split.shape[0] // 4] for head in range(4)])


@pytest.mark.parametrize("make", [plain, grouped])
@torch.no_grad()
def test_spread_and_entropy_are_those_of_every_head(make) -> None:
    model, weights = build(make)
    (row,) = measure_scale(model)
    x = torch.randn(65, 32, generator=torch.Generator().manual_seed(0))
    logits = heads(weights, "q", x) @ heads(weights, "k", x).mT / math.sqrt(8)
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
    assert row.entropy == pytest.approx(float(entropy), rel=1e-4)  # in float32 here
    x, y = torch.randn(2, 4000, 32)
    spread = (heads(weights, "q", x) @ heads(weights, "k", y).mT / math.sqrt(8)).var(-1).mean().sqrt()
    assert row.logit_std == pytest.approx(float(spread), rel=0.03)
    assert (row.name, row.dim, row.num_heads, row.bounded) == ("attn", 32, 4, False)
    for part, found in (("q", row.q_std), ("k", row.k_std), ("v", row.v_std)):
        assert found == pytest.approx(float(weights[part].std(correction=0)), rel=1e-5)


def test_weight_of_one_element_has_a_spread_of_zero() -> None:
    (row,) = measure_scale(nn.ModuleDict({"attn": zoo.Attention(1, 1, 1)}))
    assert (row.q_std, row.k_std, row.v_std) == (0.0, 0.0, 0.0)


def test_number_of_heads_is_read_off_their_width_where_it_is_not_told() -> None:
    model = nn.ModuleDict({"attn": Attention(32, 4)})
    rows = measure_scale(model)
    model["attn"].num_heads = None
    assert measure_scale(model) == rows
    model["attn"].head_dim = None
    assert measure_scale(model) == ()


@pytest.mark.parametrize(
    "change",
    [
        lambda attention: vars(attention).update(num_heads=24, scale=2**-0.5),  # no divisor of 64, a multiple of 16 / 2
        lambda attention: setattr(attention, "k_proj", nn.Linear(32, 16)),
        lambda attention: setattr(attention, "k_proj", nn.Linear(64, 12)),
        lambda attention: setattr(attention, "k_proj", nn.Linear(64, 24)),
        lambda attention: setattr(attention, "q_norm", nn.BatchNorm1d(8)),
        lambda attention: setattr(attention, "k_norm", nn.LayerNorm(16)),
        lambda attention: setattr(attention, "scale", torch.tensor(8**-0.5, dtype=torch.float64)),
    ],
    ids=["heads", "other tokens", "part of a head", "groups", "statistics", "norm over all", "learned scale"],
)
def test_what_is_no_dot_product_of_heads_has_no_row(change) -> None:
    model = nn.ModuleDict({"attn": AttentionRope(64, 8, qkv_fused=False, num_kv_heads=2)})
    assert len(measure_scale(model)) == 1
    change(model["attn"])
    assert measure_scale(model) == ()


@pytest.mark.parametrize(("norms", "bounded", "std"), [(["q_norm"], False, 8), (["q_norm", "k_norm"], True, 1)])
def test_logits_are_bounded_if_both_queries_and_keys_are_normalised(norms, bounded, std) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"attn": Attention(64, 2)})
    nn.init.normal_(model["attn"].qkv.weight)
    for norm in norms:
        setattr(model["attn"], norm, nn.LayerNorm(32))
    (row,) = measure_scale(model)
    assert row.bounded is bounded
    assert row.logit_std == pytest.approx(std, rel=0.1)  # sqrt(64), the spread of a key's values
    assert len(zoo.audit(model).findings) == (not bounded)


def test_norm_of_the_model_keeps_its_dtype() -> None:
    model = nn.ModuleDict({"attn": Attention(64, 2, qk_norm=True, norm_layer=nn.LayerNorm).bfloat16()})
    assert len(measure_scale(model)) == 1
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
