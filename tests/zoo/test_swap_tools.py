"""What people do to a timm model still works on one whose attention was swapped."""

import copy
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file, save_file
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from timm.utils import ModelEmaV3
from torch import Tensor, nn

import zoo

BuildStock = Callable[..., nn.Module]


@pytest.fixture
def pair(build_stock: BuildStock, form: str, variant: str) -> tuple[nn.Module, nn.Module]:
    """A swapped model and the stock one that it was."""
    ours = build_stock(form)
    zoo.swap_attention(ours, variant)
    return ours, build_stock(form)


Pair = tuple[nn.Module, nn.Module]


def test_deepcopy_is_independent_and_equal(pair: Pair, images: Tensor) -> None:
    ours, stock = pair
    copied = copy.deepcopy(ours)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    assert torch.equal(copied(images), stock(images))


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # timm's RmsNorm, stock too
def test_autocast_gives_the_stock_models_numbers(pair: Pair, images: Tensor) -> None:
    ours, stock = pair
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(ours(images), stock(images))


def test_bfloat16_gives_the_stock_models_numbers(pair: Pair, images: Tensor) -> None:
    ours, stock = (model.to(torch.bfloat16) for model in pair)
    assert torch.equal(ours(images.to(torch.bfloat16)), stock(images.to(torch.bfloat16)))


def test_gradient_checkpointing_gives_the_same_gradients(pair: Pair, images: Tensor) -> None:
    ours, stock = (model.train() for model in pair)
    for model in (ours, stock):
        torch.manual_seed(0)
        model.set_grad_checkpointing(model is ours)  # type: ignore[operator]
        model(images).square().sum().backward()
    wanted = {name: p.grad for name, p in stock.named_parameters()}
    shared = {name: p.grad for name, p in ours.named_parameters() if name in wanted}
    assert len(shared) > 10
    for name, gradient in shared.items():
        assert gradient is not None
        assert torch.equal(gradient, wanted[name]), name  # type: ignore[arg-type]


def test_model_ema_follows_bit_for_bit(pair: Pair, images: Tensor) -> None:
    ours, stock = pair
    averages = [ModelEmaV3(model, decay=0.5) for model in (ours, stock)]
    for model, average in zip((ours, stock), averages, strict=True):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        average.update(model)
    assert torch.equal(averages[0](images), averages[1](images))
    assert not torch.equal(averages[0](images), ours(images))


def test_state_dict_survives_a_safetensors_file(pair: Pair, images: Tensor, tmp_path: object) -> None:
    ours, stock = pair
    save_file(ours.state_dict(), f"{tmp_path}/model.safetensors")
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    ours.load_state_dict(load_file(f"{tmp_path}/model.safetensors"), strict=True)
    assert torch.equal(ours(images), stock(images))


@pytest.mark.parametrize("form", ["vit", "rope", "eva"], indirect=True)
def test_timms_rescaling_by_depth_lands(pair: Pair, images: Tensor) -> None:
    ours, stock = pair
    before = ours(images)
    for model in pair:
        model.fix_init_weight()  # type: ignore[operator]
    assert torch.equal(ours(images), stock(images))
    assert not torch.equal(ours(images), before)


def test_weight_decay_and_layer_decay_group_as_before(build_stock: BuildStock, variant: str) -> None:
    ours, stock = build_stock(), build_stock()
    zoo.swap_attention(ours, variant)
    for build in (param_groups_weight_decay, param_groups_layer_decay):
        sums = []
        for model in (ours, stock):
            groups = build(model, weight_decay=0.05)
            totals: dict[tuple[float, float], int] = {}
            for group in groups:
                key = (group["weight_decay"], round(group.get("lr_scale", 1.0), 6))
                totals[key] = totals.get(key, 0) + sum(p.numel() for p in group["params"])
            sums.append(totals)
        assert sums[0] == sums[1]


def test_a_step_of_adamw_stays_the_stock_models(build_stock: BuildStock, images: Tensor, variant: str) -> None:
    ours, stock = build_stock(), build_stock()
    zoo.swap_attention(ours, variant)
    for model in (ours, stock):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            model(images).square().sum().backward()
            optimizer.step()
    assert torch.equal(ours(images), stock(images))  # AdamW works element by element


@pytest.mark.slow
def test_a_model_compiled_in_place_sees_the_swap(build_stock: BuildStock, images: Tensor, variant: str) -> None:
    model = build_stock()
    model.compile(backend="eager")
    before = model(images)
    zoo.swap_attention(model, variant, init="normal", seed=1)
    wanted = build_stock()
    zoo.swap_attention(wanted, variant, init="normal", seed=1)
    assert torch.equal(model(images), wanted(images))
    assert not torch.equal(model(images), before)
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["vit", "rope_grouped", "eva"], indirect=True)
def test_export_and_compile_give_the_same_numbers(pair: Pair, images: Tensor) -> None:
    ours, stock = pair
    wanted = stock(images)
    exported = torch.export.export(ours, (images,)).module()
    torch.testing.assert_close(exported(images), wanted)  # decomposed kernels may round elsewhere
    torch.testing.assert_close(torch.compile(ours, backend="aot_eager", fullgraph=True)(images), wanted)
    torch.compiler.reset()
