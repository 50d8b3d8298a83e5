"""What people do to a timm model still works on one whose attention was swapped."""

from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file, save_file
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


def test_state_dict_survives_a_safetensors_file(pair: Pair, images: Tensor, tmp_path: object) -> None:
    ours, stock = pair
    save_file(ours.state_dict(), f"{tmp_path}/model.safetensors")
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    ours.load_state_dict(load_file(f"{tmp_path}/model.safetensors"), strict=True)
    assert torch.equal(ours(images), stock(images))


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
