import math
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import zoo
from zoo.errors import SwapError, UnknownNameError
from zoo.init import INIT_SCHEMES, expected_std, init_attention, init_model

BuildStock = Callable[..., nn.Module]
DRAWN = [scheme for scheme in INIT_SCHEMES if scheme != "timm"]
DIM, HEADS, HEAD_DIM = 256, 8, 64  # inner 512: not dim, so that the two fan-ins differ
INNER = HEADS * HEAD_DIM


def drawn(
    scheme: str, dim: int = DIM, *, variant: str = "parameter", seed: int = 0, **kwargs: Any
) -> dict[str, Tensor]:
    attention = zoo.Attention(dim, HEADS, HEAD_DIM, variant=variant, **kwargs)
    init_attention(attention, scheme, torch.Generator().manual_seed(seed))
    return zoo.attention_weights(attention)[""]


@pytest.mark.parametrize(
    ("scheme", "qkv_std", "out_std", "bounded"),
    [
        ("torch", 1 / math.sqrt(3 * DIM), 1 / math.sqrt(3 * INNER), True),
        ("kaiming_raw", 1 / math.sqrt(3 * INNER), 1 / math.sqrt(3 * DIM), True),  # fan-in read off the wrong side
        ("normal", 1.0, 1.0, False),
        ("trunc_normal", 0.02, 0.02, False),
    ],
)
def test_each_scheme_has_its_formulas_spread(scheme: str, qkv_std: float, out_std: float, bounded: bool) -> None:
    weights = drawn(scheme)
    for part, std in (("q", qkv_std), ("k", qkv_std), ("v", qkv_std), ("out", out_std)):
        # 131072 draws: the standard error of a standard deviation is below 0.2 % of it
        assert weights[part].std().item() == pytest.approx(std, rel=0.01), part
        assert expected_std(scheme, *weights[part].shape) == pytest.approx(std)
        assert abs(weights[part].mean().item()) < 0.01 * std, part
        if bounded:
            bound = math.sqrt(3) * std  # of a uniform draw
            assert 0.999 * bound < weights[part].abs().max().item() <= bound, part


def test_kaiming_raw_equals_torchs_only_where_in_is_out() -> None:
    square, wide = (drawn("kaiming_raw", dim)["q"].std().item() * math.sqrt(3 * dim) for dim in (512, 768))
    assert square == pytest.approx(1, rel=0.01)
    assert wide == pytest.approx(math.sqrt(768 / 512), rel=0.01)


def test_schemes_are_torchs_own_functions_of_one_draw() -> None:
    torch.manual_seed(3)
    linear = nn.Linear(DIM, INNER)
    torch.manual_seed(3)
    attention = zoo.Attention(DIM, HEADS, HEAD_DIM, qkv_bias=True)
    init_attention(attention, "torch", torch.Generator().manual_seed(3))
    assert zoo.attention_weights(attention)[""]["q"].std().item() == pytest.approx(linear.weight.std().item(), rel=0.01)
    raw = nn.init.kaiming_uniform_(torch.empty(DIM, INNER), a=math.sqrt(5), generator=torch.Generator().manual_seed(3))
    assert torch.equal(drawn("kaiming_raw", seed=3)["q"], raw.t())
    assert torch.equal(
        drawn("normal", seed=3)["q"], torch.randn(DIM, INNER, generator=torch.Generator().manual_seed(3)).t()
    )


@pytest.mark.parametrize("dim", [64, 256, 512, 768])
@pytest.mark.parametrize(
    ("scheme", "expected"),
    [("torch", lambda _: 1 / 3), ("normal", lambda dim: dim), ("kaiming_raw", lambda dim: dim / (3 * INNER))],
)
def test_logits_spread_as_the_survey_says(scheme: str, dim: int, expected: Callable[[int], float]) -> None:
    weights = drawn(scheme, dim)
    x = torch.randn(8, 65, dim, generator=torch.Generator().manual_seed(1))
    q, k = ((x @ weights[part].t()).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for part in "qk")
    logits = q @ k.transpose(-2, -1) / math.sqrt(HEAD_DIM)
    # 8 heads of one draw and 520 tokens: the measured spread itself varies by 1 to 3 %
    assert logits.std().item() == pytest.approx(expected(dim), rel=0.06)


@pytest.mark.parametrize("scheme", DRAWN)
def test_biases_follow_the_scheme(scheme: str, variant: str) -> None:
    weights = drawn(scheme, variant=variant, qkv_bias=True)
    for part, fan_in in (("q", DIM), ("k", DIM), ("v", DIM), ("out", INNER)):
        bias = weights[f"{part}_bias"]
        if scheme == "torch":
            assert bias.std().item() == pytest.approx(1 / math.sqrt(3 * fan_in), rel=0.1)
            assert bias.abs().max().item() <= 1 / math.sqrt(fan_in)
        else:
            assert (bias == 0).all()


@pytest.mark.parametrize("scheme", INIT_SCHEMES)
def test_arms_of_one_scheme_and_seed_are_one_function(
    build_stock: BuildStock, images: Tensor, form: str, scheme: str
) -> None:
    arms = {variant: build_stock(form) for variant in zoo.list_attentions()}
    for variant, model in arms.items():
        assert zoo.swap_attention(model, variant, init=scheme, seed=11).init == scheme
    wanted = arms["linear"](images)
    assert not torch.equal(wanted, build_stock(form)(images))
    for variant, model in arms.items():
        assert torch.equal(model(images), wanted), variant
    assert torch.isfinite(wanted).all()


def test_another_seed_is_another_draw() -> None:
    assert torch.equal(drawn("torch", seed=1)["q"], drawn("torch", seed=1)["q"])
    assert not torch.equal(drawn("torch", seed=1)["q"], drawn("torch", seed=2)["q"])


def test_a_seeded_draw_is_the_same_under_other_defaults(build_stock: BuildStock) -> None:
    wanted, got = build_stock(), build_stock().to(torch.bfloat16)
    zoo.swap_attention(wanted, "parameter", init="torch", seed=4)
    with torch.device("meta"):
        torch.set_default_dtype(torch.float64)
        try:
            zoo.swap_attention(got, "parameter", init="torch", seed=4)
        finally:
            torch.set_default_dtype(torch.float32)
    for name, parameter in wanted.named_parameters():
        if ".to_" in name:
            assert torch.equal(got.get_parameter(name), parameter.to(torch.bfloat16)), name


@pytest.mark.parametrize("scheme", INIT_SCHEMES)
def test_a_seed_leaves_the_global_stream_and_no_seed_uses_it(build_stock: BuildStock, scheme: str) -> None:
    model, before = build_stock(), torch.get_rng_state()
    init_model(model, scheme, seed=0)
    assert torch.equal(torch.get_rng_state(), before)
    init_model(model, scheme)
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("scheme", INIT_SCHEMES)
def test_only_attention_is_drawn(build_stock: BuildStock, scheme: str) -> None:
    model, before = build_stock("eva"), build_stock("eva").state_dict()
    init_model(model, scheme, seed=0)
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    leaves = ("qkv.weight", "q_bias", "v_bias", "proj.weight", "proj.bias")
    assert changed == {f"blocks.{i}.attn.{leaf}" for i in range(3) for leaf in leaves}
    assert (model.get_buffer("blocks.0.attn.k_bias") == 0).all()


@pytest.mark.parametrize("form", ["vit", "rope", "eva", "eva_separate"])
def test_timms_scheme_is_timms_own_init_weights(build_stock: BuildStock, form: str, variant: str) -> None:
    stock, model = build_stock(form), build_stock(form)
    torch.manual_seed(9)
    stock.init_weights()
    for first in ("linear", variant):  # on timm's own modules, and again on those already swapped
        zoo.swap_attention(model, first, init="timm", seed=9)
        wanted, got = zoo.attention_weights(stock), zoo.attention_weights(model)
        for name, tensors in wanted.items():
            for key, tensor in tensors.items():
                assert torch.equal(got[name][key], tensor), (name, key)


def test_timms_scheme_spreads_as_timms_construction_and_scales_by_depth() -> None:
    kwargs = {"img_size": 28, "embed_dim": 128, "depth": 3, "num_heads": 2, "num_classes": 3}
    torch.manual_seed(0)
    stock = timm.create_model("eva_giant_patch14_224", **kwargs)
    model = timm.create_model("eva_giant_patch14_224", **kwargs)
    zoo.swap_attention(model, "parameter", init="timm", seed=1)
    wanted, got = zoo.attention_weights(stock), zoo.attention_weights(model)
    for layer, (ours, theirs) in enumerate(zip(got.values(), wanted.values(), strict=True), start=1):
        for part in ("q", "k", "v", "out"):
            std = 0.02 / math.sqrt(2 * layer) if part == "out" else 0.02
            # 16384 draws: the standard error is 0.6 %
            assert ours[part].std().item() == pytest.approx(std, rel=0.03), (layer, part)
            assert theirs[part].std().item() == pytest.approx(std, rel=0.03), (layer, part)


def test_timms_scheme_wants_a_timm_model(build_stock: BuildStock) -> None:
    with pytest.raises(SwapError, match="Sequential has no init_weights of timm's: choose init='trunc_normal'"):
        init_model(build_stock().get_submodule("blocks"), "timm")


def test_timms_spread_is_timms_to_know() -> None:
    assert expected_std("timm", 8, 8) is None
    assert expected_std(None, 8, 8) is None


def test_an_unknown_scheme_gives_the_nearest(build_stock: BuildStock) -> None:
    with pytest.raises(UnknownNameError, match="unknown init 'trunc_norm', did you mean 'trunc_normal'"):
        init_model(build_stock(), "trunc_norm")
    with pytest.raises(UnknownNameError, match="unknown init 'timm'; known are kaiming_raw, normal"):
        init_attention(zoo.Attention(8, 1, 8), "timm")
