"""Which modules a swap takes, and what it says of them."""

from collections.abc import Callable

import pytest
from torch import Tensor, nn

import zoo
from zoo.errors import SwapError, UnknownNameError

BuildStock = Callable[..., nn.Module]


def test_what_holds_an_attention_names_it(build_stock: BuildStock) -> None:
    assert zoo.swap_attention(build_stock(), "parameter", names="blocks.1").modules == ("blocks.1.attn",)
    assert len(zoo.swap_attention(build_stock(), "parameter", names="blocks").modules) == 3
    with pytest.raises(UnknownNameError, match="unknown attention module 'block'"):
        zoo.swap_attention(build_stock(), "parameter", names="block")


def test_gradients_that_a_swap_drops_are_counted(build_stock: BuildStock, images: Tensor) -> None:
    model = build_stock()
    assert zoo.swap_attention(model, "separate").gradients_dropped == 0
    model(images).sum().backward()
    report = zoo.swap_attention(model, "parameter")
    assert str(report) == "3 attention modules -> parameter, weights carried over, 24 gradients dropped"
    assert "dropped" not in str(zoo.swap_attention(model, "parameter"))


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(SwapError, match=r"wanted is a model, an nn\.Module; got str"):
        zoo.swap_attention("vit_tiny_patch16_224", "parameter")  # type: ignore[arg-type]
