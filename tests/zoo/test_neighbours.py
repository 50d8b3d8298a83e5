"""What timm does to a model of its own, it does to a swapped one: compared to the stock model, bit for bit."""

from functools import partial
from typing import Any

import pytest
import timm
import torch
from timm.models import group_parameters
from timm.optim import create_optimizer_v2, param_groups_layer_decay
from timm.utils import AttentionExtract, ModelEmaV3, freeze, reparameterize_model, unfreeze
from torch import Tensor, nn

import zoo
from tests.zoo.families import FAMILIES, SLOW, VARIANTS, as_stock, build_images, build_pair, build_stock, check_alike
from zoo.errors import SwapError
from zoo.projections import Projection

pytestmark = pytest.mark.parametrize("variant", VARIANTS)
having = partial(pytest.mark.parametrize, "family")
every_family = having([pytest.param(f, marks=pytest.mark.slow) if f in SLOW else f for f in FAMILIES])


def values(model: nn.Module) -> dict[str, Tensor]:
    return as_stock(model, lambda parameter: parameter.detach())


def forget(model: nn.Module) -> nn.Module:
    """Put NaN in every weight, so that one which nothing drew anew shows."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and next(module.parameters(), None) is not None:
            for parameter in module.parameters():
                parameter.data.fill_(torch.nan)
    return model


def list_modes(family: str) -> tuple[str, ...]:
    model = build_stock(family)
    if "mode" not in model.init_weights.__code__.co_varnames:  # type: ignore[union-attr]
        return ("",)
    return ("", "jax", "jax_nlhb", "moco") if family == "naflex" else ("", "reset", "jax", "jax_nlhb", "moco")


MODES = [(family, mode) for family in FAMILIES if family != "levit" for mode in list_modes(family)]


@pytest.mark.parametrize(("family", "mode"), [*MODES, pytest.param("levit", "", marks=pytest.mark.slow)])
def test_init_weights_draws_as_stock_timm_in_every_mode(family: str, variant: str, mode: str) -> None:
    def draw(model: nn.Module) -> dict[str, Tensor]:
        forget(model).init_weights(**({"mode": mode} if mode else {}))  # type: ignore[operator]
        drawn = values(model)
        return {name: drawn[name] for name in drawn if drawn[name].dim() > 1}  # EVA's separate k has no bias to draw

    ours, _ = check_alike(family, variant, draw)
    if family != "eva_apart":  # one part to a Linear: "separate" leaves all as it is
        assert any(isinstance(module, Projection) for module in ours.modules())


@every_family
def test_an_init_function_applied_to_every_module_draws_alike(family: str, variant: str) -> None:
    def draw(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight)
            if module.bias is not None:
                nn.init.uniform_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            module.weight.data.fill_(0.5)

    check_alike(family, variant, lambda model: values(forget(model).apply(draw)))


@having(["vit", "rope", "eva", "eva_apart", "beit", "relpos", "naflex", "hybrid"])
def test_fix_init_weight_rescales_by_depth(family: str, variant: str) -> None:
    before = values(build_stock(family))["blocks.1.attn.proj.weight"]
    ours, _ = check_alike(family, variant, lambda model: (model.fix_init_weight(), values(model)))  # type: ignore[operator]
    assert torch.equal(values(ours)["blocks.1.attn.proj.weight"], before.div(4**0.5))


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:FutureWarning", "ignore:torch.searchsorted")
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:UserWarning")
@having(["vit", "rope", "eva", "beit", "relpos", "swin", "swin_v2", "hybrid"])
def test_set_input_size_takes_larger_images(family: str, variant: str) -> None:
    images = build_images(family, scale=2)

    def enlarge(model: nn.Module) -> Tensor:
        model.set_input_size(img_size=tuple(images.shape[-2:]))  # type: ignore[operator]
        return model(images)  # type: ignore[no-any-return]

    check_alike(family, variant, enlarge)


@every_family
def test_reset_classifier_draws_the_same_head(family: str, variant: str) -> None:
    def reset(model: nn.Module) -> tuple[Tensor, Tensor]:
        model.reset_classifier(5)  # type: ignore[operator]
        logits = model(build_images(family))
        model.reset_classifier(0)  # type: ignore[operator]
        return logits, model(build_images(family))

    check_alike(family, variant, reset)


@every_family
def test_no_weight_decay_names_the_same_parameters(family: str, variant: str) -> None:
    def names(model: nn.Module) -> list[str]:
        matched = set(model.no_weight_decay())  # type: ignore[operator]
        return ["some", *sorted(name for name, _ in model.named_parameters() if name in matched)]

    check_alike(family, variant, names)


@having([family for family in FAMILIES if family != "levit"])  # its BatchNorm is stock timm's too
def test_layer_decay_puts_each_part_where_the_fused_weight_was(family: str, variant: str) -> None:
    def group(model: nn.Module) -> dict[str, Tensor]:
        listed = model.no_weight_decay()  # type: ignore[operator]
        groups = param_groups_layer_decay(model, weight_decay=0.05, layer_decay=0.5, no_weight_decay_list=listed)
        said = {id(p): group["lr_scale"] + 100 * group["weight_decay"] for group in groups for p in group["params"]}
        # written all over the parameter's shape, so that joining parts joins what is said of them
        return as_stock(model, lambda parameter: torch.full_like(parameter, said[id(parameter)]))

    check_alike(family, variant, group)


@every_family
def test_group_matcher_groups_by_block(family: str, variant: str) -> None:
    def number(model: nn.Module) -> dict[str, Tensor]:
        matcher = model.group_matcher(coarse=False)  # type: ignore[operator]
        groups = group_parameters(model, matcher)
        said = {id(model.get_parameter(name)): group for group, names in groups.items() for name in names}
        return as_stock(model, lambda parameter: torch.full_like(parameter, said[id(parameter)]))

    check_alike(family, variant, number)


@having([family for family in FAMILIES if family != "levit"])  # timm's own wants a second pass of the same draws
def test_gradient_checkpointing_gives_the_same_gradients(family: str, variant: str) -> None:
    def train(model: nn.Module) -> dict[str, Tensor]:
        model.set_grad_checkpointing()  # type: ignore[operator]
        model.train()(build_images(family)).square().sum().backward()
        return as_stock(model, lambda parameter: parameter.grad)

    ours, stock = check_alike(family, variant, train)
    assert as_stock(ours, lambda p: p.grad).keys() == as_stock(stock, lambda p: p.grad).keys()


@every_family
def test_forward_intermediates_gives_the_same_maps(family: str, variant: str) -> None:
    check_alike(family, variant, lambda model: model.forward_intermediates(build_images(family)))  # type: ignore[operator]


@having(["vit", "hybrid"])  # the others have none
def test_get_intermediate_layers_gives_the_same_tokens(family: str, variant: str) -> None:
    images = build_images(family)
    check_alike(family, variant, lambda model: model.get_intermediate_layers(images, n=2, reshape=True))  # type: ignore[operator]


@every_family
def test_prune_intermediate_layers_cuts_the_same_blocks(family: str, variant: str) -> None:
    def prune(model: nn.Module) -> Any:
        kept = model.prune_intermediate_layers(1)  # type: ignore[operator]
        return kept, model.forward_intermediates(build_images(family), indices=1, intermediates_only=True)  # type: ignore[operator]

    check_alike(family, variant, prune)


@pytest.mark.parametrize(
    ("family", "feature_cls"),
    [("vit", "getter"), ("eva", "getter"), ("beit", "getter"), ("swin_v2", "getter"), ("swin_v2", "list")],
)
def test_features_only_gives_the_same_maps(family: str, variant: str, feature_cls: str) -> None:
    name, kwargs = FAMILIES[family]
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        kwargs_ = {key: value for key, value in kwargs.items() if key != "num_classes"}
        models.append(
            timm.create_model(name, features_only=True, feature_cls=feature_cls, out_indices=(0, 1), **kwargs_).eval()
        )
    ours, stock = models
    report = zoo.swap_attention(ours, variant)
    assert len(report.modules) == 2
    for got, wanted in zip(ours(build_images(family)), stock(build_images(family)), strict=True):
        assert torch.equal(got, wanted)


@every_family
def test_reparameterize_model_and_freezing_leave_a_projection_whole(family: str, variant: str) -> None:
    ours, _ = check_alike(family, variant, lambda model: reparameterize_model(model)(build_images(family)))
    copied = reparameterize_model(ours)
    if family != "levit":  # whose Linear layers timm merges with the BatchNorm behind them
        kept, was = ([type(module) for module in model.modules()] for model in (copied, ours))
        assert kept == was
    for change, flag in ((freeze, False), (unfreeze, True)):
        change(ours)
        assert {parameter.requires_grad for parameter in ours.parameters()} == {flag}


@every_family
def test_model_ema_averages_to_the_same_model(family: str, variant: str) -> None:
    def average(model: nn.Module) -> Tensor:
        ema = ModelEmaV3(model, decay=0.5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        ema.update(model)
        return ema(build_images(family))  # type: ignore[no-any-return]

    check_alike(family, variant, average)


@pytest.mark.parametrize("method", ["hook", "fx"])
def test_attention_maps_come_out_alike(variant: str, method: str) -> None:
    def extract(model: nn.Module) -> dict[str, Tensor]:
        for block in model.blocks:  # type: ignore[union-attr]
            block.attn.fused_attn = False  # type: ignore[union-attr, assignment]
        maps = AttentionExtract(model, method=method)(build_images("vit"))
        assert len(maps) == 2
        return dict(maps)

    check_alike("vit", variant, extract)


def test_timms_attn_layer_argument_is_swapped_too(variant: str) -> None:
    models = [build_stock("vit", attn_layer="diff") for _ in range(2)]
    zoo.swap_attention(models[0], variant)
    assert torch.equal(models[0](build_images("vit")), models[1](build_images("vit")))


@pytest.mark.parametrize("name", ["adamw", "lamb", "muon"])
def test_timms_optimizers_take_every_parameter(variant: str, name: str) -> None:
    ours, _ = build_pair("vit", variant)
    before = {key: parameter.detach().clone() for key, parameter in ours.named_parameters()}
    optimizer = create_optimizer_v2(ours, opt=name, lr=0.01, weight_decay=0.05)
    ours(build_images("vit")).square().sum().backward()
    optimizer.step()
    for key, parameter in ours.named_parameters():
        assert not torch.equal(parameter, before[key]), key
        assert torch.isfinite(parameter).all(), key


def test_a_wrapped_feature_net_is_swapped_in_place_of_a_prefix(variant: str) -> None:
    holder = nn.ModuleDict({"backbone": build_stock("vit"), "neck": nn.Linear(3, 3)})
    report = zoo.swap_attention(holder, variant)
    assert report.modules == ("backbone.blocks.0.attn", "backbone.blocks.1.attn")
    with pytest.raises(SwapError, match="has no attention that can be swapped"):
        zoo.swap_attention(holder["neck"], variant)
