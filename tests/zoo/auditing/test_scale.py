import math

import pytest
import timm
import torch
from torch import nn

import zoo
from zoo.auditing.scale import measure_scale


def randn_attention(dim: int, num_heads: int) -> nn.Module:
    """An attention whose q, k and v are raw matrices of a unit normal draw."""
    torch.manual_seed(0)
    attention = zoo.Attention(dim, num_heads, dim // num_heads, variant="parameter")
    for name, parameter in attention.named_parameters():
        if "to_" in name:
            nn.init.normal_(parameter)
    return nn.ModuleDict({"attn": attention})


def test_unit_normal_matrices_warn_with_the_spread_beside_the_expected() -> None:  # reported: graykode/xlnet-Pytorch#17
    report = zoo.audit(randn_attention(384, 8))
    (row,) = report.attentions
    assert row.logit_std == pytest.approx(384, rel=0.02)  # one draw of 3 * 147,456 values
    assert row.entropy < 0.1
    (finding,) = report.findings
    assert (finding.severity, finding.tensor) == ("warning", "attn")
    assert "expected 0.33), so it attends to one token: entropy 0.0" in finding.message
    assert "q has std 0.999, k 1, expected 1/sqrt(3*384) = 0.0295" in finding.message
    report.raise_for_findings()


@pytest.mark.parametrize("variant", ["linear", "separate", "parameter"])
@pytest.mark.parametrize("dim", [64, 384])
def test_torch_init_gives_a_third_at_any_width(variant, dim) -> None:
    torch.manual_seed(0)
    report = zoo.audit(nn.ModuleDict({"attn": zoo.Attention(dim, 8, 64, variant=variant)}))
    (row,) = report.attentions
    assert row.logit_std == pytest.approx(1 / 3, rel=0.05)
    assert row.q_std == pytest.approx(row.expected_std, rel=0.02)
    assert row.entropy == pytest.approx(4.12, abs=0.02)
    assert report.findings == ()


def test_spread_is_that_of_sampled_logits() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"attn": zoo.Attention(32, 4, 8)})
    (row,) = measure_scale(model)
    weights = {part: w.detach() for part, w in zoo.attention_weights(model)["attn"].items()}
    x, y = torch.randn(2, 100_000, 32)
    logits = ((x @ weights["q"].T) * (y @ weights["k"].T)).unflatten(1, (4, 8)).sum(-1) / math.sqrt(8)
    assert float(logits.std()) == pytest.approx(row.logit_std, rel=0.01)


def test_zero_matrices_warn_that_all_tokens_are_alike() -> None:
    model = randn_attention(32, 4)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    (finding,) = zoo.audit(model).findings
    assert "attends to all tokens alike: entropy 4.174 of 4.174" in finding.message


def test_only_the_attention_at_fault_is_named() -> None:
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=64, depth=3, num_heads=2, num_classes=3
    )
    nn.init.normal_(model.blocks[1].attn.qkv.weight)
    assert [finding.tensor for finding in zoo.audit(model).findings] == ["blocks.1.attn"]


def test_large_logits_of_weights_of_ordinary_size_do_not_warn() -> None:  # as training aligns queries with keys
    torch.manual_seed(0)
    model = nn.ModuleDict({"attn": zoo.Attention(384, 6, 64)})
    with torch.no_grad():
        model["attn"].qkv.weight.mul_(5)
    report = zoo.audit(model)
    assert report.attentions[0].logit_std > 4
    assert report.findings == ()


@pytest.mark.parametrize("rows", [slice(0, 384), slice(384, 768)], ids=["q", "k"])
def test_unit_normal_draw_of_queries_or_keys_alone_warns(rows) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"attn": zoo.Attention(384, 6, 64)})
    nn.init.normal_(model["attn"].qkv.weight.data[rows])
    (finding,) = zoo.audit(model).findings
    assert (finding.severity, finding.tensor) == ("warning", "attn")


def test_large_queries_that_small_keys_make_up_for_do_not_warn() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"attn": zoo.Attention(384, 6, 64)})
    with torch.no_grad():
        model["attn"].qkv.weight[:384].mul_(100)
        model["attn"].qkv.weight[384:768].div_(100)
    assert zoo.audit(model).findings == ()


def test_weights_of_any_finite_size_have_a_row() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"attn": zoo.Attention(64, 2, 32)})
    with torch.no_grad():
        model["attn"].qkv.weight.mul_(1e30)
    (finding,) = zoo.audit(model).findings
    assert (finding.check, finding.tensor) == ("scale", "attn")
    assert "attention logits have std 3.3" in finding.message
    assert "e+59" in finding.message


def test_meta_model_has_no_row() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"attn": zoo.Attention(64, 2, 32)})
    assert measure_scale(model) == ()


def test_normalised_queries_and_keys_bound_the_logits_and_do_not_warn() -> None:
    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=32,
        patch_size=8,
        embed_dim=64,
        depth=1,
        num_heads=2,
        num_classes=3,
        qk_norm=True,
    )
    attention = model.blocks[0].attn
    nn.init.normal_(attention.qkv.weight)
    nn.init.constant_(attention.q_norm.weight, 8)  # as far as training moved it
    report = zoo.audit(model)
    assert report.findings == ()
    assert report.attentions[0].bounded
    assert report.attentions[0].logit_std > 4
    assert str(report.attentions[0]).endswith("q/k normalised")


def test_grouped_keys_are_shared_by_their_queries() -> None:
    from timm.layers.attention import AttentionRope

    torch.manual_seed(0)
    (row,) = measure_scale(nn.ModuleDict({"attn": AttentionRope(64, 8, qkv_fused=False, num_kv_heads=2)}))
    assert (row.num_heads, row.dim) == (8, 64)
    assert row.logit_std == pytest.approx(1 / 3, rel=0.1)


def test_measure_is_the_same_each_time_and_leaves_the_random_stream() -> None:
    model = randn_attention(32, 4)
    state = torch.get_rng_state()
    assert measure_scale(model) == measure_scale(model)
    assert torch.equal(torch.get_rng_state(), state)
