"""Variants to be tested by the suite for a user's own, and that suite for any of them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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


class Cosine(zoo.Attention):
    """Attention by the cosine of queries and keys: another function than timm's, of the same weights."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **masks: Any) -> Tensor:
        scale = 10 * self.head_dim**0.5  # a fixed temperature in place of timm's 1 / sqrt(D)
        return super().attend(scale * F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, **masks)


class Broken(ParameterProjection):
    """A projection to be broken in one place."""


def suite(cls: type[nn.Module] | None, **attributes: Any) -> VariantSuite:
    """Register a class as `mine`, and give its suite over timm's plain attention."""
    if cls is not None:
        zoo.register_attention("mine")(cls)
    attributes = {"attention": "mine", "backbones": PLAIN} | attributes
    made: VariantSuite = type("TestMine", (VariantSuite,), attributes)()
    return made
