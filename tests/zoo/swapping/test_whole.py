"""Variants that are whole attention modules: a learned temperature for each head, 1 at the start."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from timm.layers.attention import Attention as TimmAttention
from torch import Tensor, nn

import zoo
from zoo.attention import AttentionSpec
from zoo.errors import SwapError

BuildStock = Callable[..., nn.Module]
BytesOf = Callable[[nn.Module], dict[str, bytes]]
pytestmark = pytest.mark.usefixtures("temperature")
PLAIN = ["vit", "vit_no_bias", "vit_norms"]


@pytest.fixture(params=["linear", "parameter"])
def temperature(request: pytest.FixtureRequest, own_registry: None) -> type[zoo.Attention]:  # noqa: ARG001
    """Register "temperature", its projections kept in either form."""

    @zoo.register_attention("temperature")
    class Temperature(zoo.Attention):
        projection = request.param

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.temperature = nn.Parameter(torch.ones(self.num_heads, 1, 1))

        def attend(self, q: Tensor, k: Tensor, v: Tensor, **masks: Any) -> Tensor:
            return super().attend(q * self.temperature, k, v, **masks)

    return Temperature


@pytest.mark.parametrize("plain", PLAIN)
def test_at_identity_the_model_stays_the_same_function(build_stock: BuildStock, images: Tensor, plain: str) -> None:
    ours, stock = build_stock(plain), build_stock(plain)
    report = zoo.swap_attention(ours, "temperature")
    assert report.modules == ("blocks.0.attn", "blocks.1.attn", "blocks.2.attn")
    assert str(report).endswith("weights carried over, the function is now the variant's own")
    assert not zoo.swap_attention(ours, "temperature").is_whole  # it was there already
    torch.testing.assert_close(ours(images), stock(images), rtol=1e-6, atol=1e-6)  # 1 * q is q; layouts may differ
    ours(images).square().sum().backward()
    stock(images).square().sum().backward()
    for name in ("patch_embed.proj.weight", "blocks.1.mlp.fc1.weight", "head.weight"):
        torch.testing.assert_close(ours.get_parameter(name).grad, stock.get_parameter(name).grad, rtol=1e-4, atol=1e-5)
    assert ours.get_parameter("blocks.1.attn.temperature").grad is not None


def test_the_module_that_it_stands_for_keeps_no_weights(build_stock: BuildStock) -> None:
    model = build_stock()
    zoo.swap_attention(model, "temperature")
    origin = vars(model.get_submodule("blocks.0.attn"))["_origin"].module
    assert type(origin) is TimmAttention
    assert list(origin.parameters()) == []


def test_rates_of_dropout_and_the_mode_are_carried_over(build_stock: BuildStock) -> None:
    model = build_stock(attn_drop_rate=0.3, proj_drop_rate=0.2).train()
    model.get_submodule("blocks.0.attn").eval()
    zoo.swap_attention(model, "temperature")
    first, last = (model.get_submodule(f"blocks.{i}.attn") for i in (0, 2))
    assert (first.get_submodule("attn_drop").p, first.get_submodule("proj_drop").p) == (0.3, 0.2)
    assert (first.training, last.training, last.get_submodule("proj_drop").training) == (False, True, True)


def test_masks_reach_the_variant(build_stock: BuildStock) -> None:
    ours, stock = build_stock(), build_stock()
    zoo.swap_attention(ours, "temperature")
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    for arguments in ({"attn_mask": mask}, {"is_causal": True}):
        got, want = (model.get_submodule("blocks.0.attn")(x, **arguments) for model in (ours, stock))
        torch.testing.assert_close(got, want)
    assert not torch.allclose(ours.get_submodule("blocks.0.attn")(x), got)


def test_a_restore_of_a_variant_without_parameters_gives_timms_module_back(
    build_stock: BuildStock, images: Tensor, bytes_of: BytesOf
) -> None:
    @zoo.register_attention("twice")
    class Twice(zoo.Attention):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, **masks: Any) -> Tensor:
            return super().attend(2 * q, k, v, **masks)

    model = build_stock("vit_norms")
    before, logits = bytes_of(model), model(images)
    zoo.swap_attention(model, "twice")
    assert not torch.allclose(model(images), logits)
    zoo.swap_attention(model, "parameter")  # another projection also means timm's own module
    assert type(model.get_submodule("blocks.0.attn")) is TimmAttention
    zoo.swap_attention(model, "twice")
    zoo.restore_attention(copied := copy.deepcopy(model))
    assert bytes_of(copied) == before
    assert torch.equal(copied(images), logits)
    assert {type(module) for name, module in copied.named_modules() if name.endswith(".attn")} == {TimmAttention}
    assert type(model.get_submodule("blocks.0.attn")) is Twice


def test_what_only_the_variant_has_is_not_dropped_in_silence(build_stock: BuildStock, bytes_of: BytesOf) -> None:
    model = build_stock()
    zoo.swap_attention(model, "temperature")
    before, modules = bytes_of(model), [id(module) for module in model.modules()]
    message = r"blocks\.0\.attn\.temperature is a parameter of Temperature alone.*; nothing was changed"
    for attention in ("linear", "parameter"):
        with pytest.raises(SwapError, match=message):
            zoo.swap_attention(model, attention)
    with pytest.raises(SwapError, match=message):
        zoo.restore_attention(model)
    assert (bytes_of(model), [id(module) for module in model.modules()]) == (before, modules)
    zoo.swap_attention(model, "temperature")  # it is there already
    assert bytes_of(model) == before


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("vit_gated_wide", r"blocks\.0\.attn: Temperature cannot honour the gate on its output"),
        ("rope", r"blocks\.0\.attn: Temperature cannot honour what AttentionRope does"),
        ("eva", r"blocks\.0\.attn: Temperature cannot honour what EvaAttention does"),
    ],
)
def test_what_it_cannot_honour_is_refused_by_name(
    build_stock: BuildStock, bytes_of: BytesOf, form: str, message: str
) -> None:
    model = build_stock(form)
    before = bytes_of(model)
    with pytest.raises(SwapError, match=f"{message}; nothing was changed"):
        zoo.swap_attention(model, "temperature")
    assert bytes_of(model) == before


def test_a_hook_on_the_module_is_refused_not_lost(build_stock: BuildStock) -> None:
    model = build_stock()
    model.get_submodule("blocks.1.attn").register_forward_hook(lambda *_: None)
    with pytest.raises(SwapError, match=r"blocks\.1\.attn: has forward hooks that a swap would lose"):
        zoo.swap_attention(model, "temperature")


def test_an_error_midway_puts_every_module_back(build_stock: BuildStock, bytes_of: BytesOf, images: Tensor) -> None:
    made = []

    @zoo.register_attention("unlucky")
    class Unlucky(zoo.Attention):
        projection = "parameter"

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)
            if len(made) == 3:
                raise RuntimeError("planted")

    model = build_stock()
    before, logits, modules = bytes_of(model), model(images), [id(module) for module in model.modules()]
    kept = list(model.modules())
    with pytest.raises(SwapError, match=r"blocks\.2\.attn: Unlucky cannot be built: RuntimeError: planted; nothing"):
        zoo.swap_attention(model, "unlucky")
    assert [id(module) for module in model.modules()] == modules == [id(module) for module in kept]
    assert bytes_of(model) == before
    assert torch.equal(model(images), logits)


def test_it_trains_saves_audits_and_shows_its_weights(build_stock: BuildStock, images: Tensor) -> None:
    model = build_stock().train()
    zoo.swap_attention(model, "temperature")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = zoo.snapshot(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        model(images).square().sum().backward()
        optimizer.step()
    report = zoo.audit(model, optimizer, batch=images, before=before)
    assert report.errors == ()
    assert zoo.attention_weights(model)["blocks.0.attn"]["q"].shape == (32, 32)
    again = build_stock()
    zoo.swap_attention(again, "temperature")
    again.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(again.eval()(images), model.eval()(images))


def test_an_attention_that_is_the_whole_model_has_no_place_for_another() -> None:
    alone = zoo.Attention(16, 2, 8)
    with pytest.raises(SwapError, match="the model itself is Attention"):
        zoo.swap_attention(alone, "temperature")


def test_the_spec_says_what_an_attention_is(build_stock: BuildStock) -> None:
    spec = AttentionSpec.read(build_stock("vit_norms", attn_drop_rate=0.1).get_submodule("blocks.0.attn"))
    assert spec == AttentionSpec(32, 2, 16, True, True, True, 0.1, 0.0, ("q_norm", "k_norm", "norm"))
    assert AttentionSpec.read(zoo.Attention(16, 1, 16, dropout=0.5)) == AttentionSpec(
        16, 1, 16, False, False, False, 0.5, 0.5
    )
