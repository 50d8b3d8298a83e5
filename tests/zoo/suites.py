"""Variants to be tested by the suite for a user's own, and that suite for any of them."""

from typing import Any

import torch
from torch import Tensor, nn

import zoo
from zoo.projections import ParameterProjection
from zoo.testing import VariantSuite
from zoo.trial import PLAIN


class Temperature(zoo.Attention):
    """A learned temperature for each head, 1 at the start."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.temperature = nn.Parameter(torch.ones(self.num_heads, 1, 1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **masks: Any) -> Tensor:
        return super().attend(q * self.temperature, k, v, **masks)


class Broken(ParameterProjection):
    """A projection to be broken in one place."""


def suite(cls: type[nn.Module] | None, **attributes: Any) -> VariantSuite:
    """Register a class as `mine`, and give its suite over timm's plain attention."""
    if cls is not None:
        zoo.register_attention("mine")(cls)
    attributes = {"attention": "mine", "backbones": PLAIN} | attributes
    made: VariantSuite = type("TestMine", (VariantSuite,), attributes)()
    return made
