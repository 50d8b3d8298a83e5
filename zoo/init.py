"""Init schemes for attention projections, by name; each fills q, k, v and out from one seeded stream.

A scheme draws the matrix (out, in) of each part, whatever a variant stores: two variants drawn with the same scheme
and seed are the same function, so that a comparison of variants compares variants. Only attention's projections are
drawn; the rest of a model keeps what it has.
"""

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from zoo.errors import SwapError, UnknownNameError
from zoo.projections import KINDS, LinearProjection, Projection, ProjectionSpec, fill_parts, part_tensors
from zoo.slots import find_places, iter_attentions, outside_biases

Draw = Callable[[int, int, torch.Generator | None], tuple[Tensor, Tensor]]


def _blank(*shape: int) -> Tensor:
    """Return CPU float32 storage to draw into, whatever torch's defaults are: one seed is one draw."""
    return torch.empty(*shape, device="cpu", dtype=torch.float32)


def _trunc_normal(out: int, in_: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Truncated normal of std 0.02, zero bias."""
    weight = nn.init.trunc_normal_(_blank(out, in_), std=0.02, generator=generator)
    return weight, _blank(out).zero_()


def _torch(out: int, in_: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """U(-1/sqrt(fan_in), 1/sqrt(fan_in)), weight and bias alike: nn.Linear's default, std 1/sqrt(3 fan_in)."""
    bound = 1 / math.sqrt(in_)
    weight = _blank(out, in_).uniform_(-bound, bound, generator=generator)
    return weight, _blank(out).uniform_(-bound, bound, generator=generator)


def _kaiming_raw(out: int, in_: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """`kaiming_uniform_(a=sqrt(5))` on a raw (in, out) matrix: its fan_in is `out`, right only if in == out."""
    raw = nn.init.kaiming_uniform_(_blank(in_, out), a=math.sqrt(5), generator=generator)
    return raw.t(), _blank(out).zero_()


def _normal(out: int, in_: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Unit normal, `torch.randn(in, out)`: the form that fails, kept so that a study can show it fail."""
    return _blank(in_, out).normal_(generator=generator).t(), _blank(out).zero_()


_DRAWS: dict[str, Draw] = {
    "torch": _torch,
    "kaiming_raw": _kaiming_raw,
    "normal": _normal,
    "trunc_normal": _trunc_normal,
}
INIT_SCHEMES = ("timm", *_DRAWS)  # "timm" is the backbone's own `init_weights`, which may scale by depth


def check_scheme(name: str) -> None:
    """Raise UnknownNameError, with the nearest name, unless `name` is a scheme."""
    if name not in INIT_SCHEMES:
        raise UnknownNameError("init", name, INIT_SCHEMES)


def expected_std(scheme: str | None, out: int, in_: int) -> float | None:
    """Return the standard deviation that a scheme gives a weight (out, in); None where only timm knows it."""
    formulas = {"torch": (3 * in_) ** -0.5, "kaiming_raw": (3 * out) ** -0.5, "normal": 1.0, "trunc_normal": 0.02}
    return formulas.get(scheme or "timm")


@torch.no_grad()
def init_attention(attention: nn.Module, scheme: str, generator: torch.Generator | None = None) -> None:
    """Draw the projections of one attention module anew, in place, on the CPU and in float32 before the cast.

    Args:
        attention: A module of a class that `zoo.timm_map` has a row for.
        scheme: One of `INIT_SCHEMES` but "timm", which belongs to a whole backbone.
        generator: The stream to draw from, on the CPU; torch's global one if None.

    Raises:
        UnknownNameError: If there is no such scheme.
    """
    if scheme not in _DRAWS:
        raise UnknownNameError("init", scheme, _DRAWS)
    outside = _trained_outside(attention)
    for place in find_places(attention):
        child, layout = place.child, place.layout
        weights, biases = (dict(part_tensors(child, layout, kind)) for kind in KINDS)
        for part, weight in weights.items():
            if part == "mlp":
                continue  # a block's first MLP layer beside q, k and v keeps what it has
            drawn, offset = _DRAWS[scheme](weight.shape[0], weight.shape[1], generator)
            weights[part] = drawn.to(weight)
            if part in biases:
                biases[part] = offset.to(weight)
            if part in outside:
                outside[part].copy_(offset)
        fill_parts(child, layout, "weight", weights)
        fill_parts(child, layout, "bias", biases)


def init_model(model: nn.Module, scheme: str, seed: int | None = None) -> None:
    """Draw the projections of every attention in a model anew, in place; see `init_attention`.

    Args:
        model: A timm model, before or after a swap.
        scheme: One of `INIT_SCHEMES`.
        seed: Of the stream; None draws from torch's global one.

    Raises:
        UnknownNameError: If there is no such scheme.
        SwapError: If the scheme is "timm" and the model has no `init_weights` of timm's.
    """
    check_scheme(scheme)
    if scheme == "timm":
        _init_as_timm(model, seed)
        return
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    for _, attention in iter_attentions(model):
        init_attention(attention, scheme, generator)


@torch.no_grad()
def _init_as_timm(model: nn.Module, seed: int | None) -> None:
    """Run timm's own `init_weights` on a copy and take over what it gives the projections."""
    init_weights = getattr(reference := copy.deepcopy(model), "init_weights", None)
    if not callable(init_weights):
        raise SwapError(f"{type(model).__name__} has no init_weights of timm's: choose init='trunc_normal' or 'torch'")
    for _, attention in iter_attentions(reference):
        _put_linear(attention)  # whatever a variant is made of, timm draws for it as for its own layers
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        init_weights()
    for (_, attention), (_, drawn) in zip(iter_attentions(model), iter_attentions(reference), strict=True):
        for place, source in zip(find_places(attention), find_places(drawn), strict=True):
            for kind in KINDS:
                fill_parts(place.child, place.layout, kind, part_tensors(source.child, source.layout, kind))
        for part, bias in _trained_outside(attention).items():
            bias.copy_(outside_biases(drawn)[part])


def _put_linear(attention: nn.Module) -> None:
    """Put nn.Linear layers of the same weights in place of one attention's projections."""
    for place in find_places(attention):
        child, layout = place.child, place.layout
        if isinstance(child, Projection):
            first = next(child.parameters())
            spec = ProjectionSpec(child.in_features, layout, child.bias is not None, first.device, first.dtype)
            linear = LinearProjection.build(spec)
            for kind in KINDS:
                fill_parts(linear, layout, kind, child.part_tensors(kind))
            place.put(linear)


def _trained_outside(attention: nn.Module) -> dict[str, Tensor]:
    """Return the biases outside of the projections that are parameters; a buffer (EVA's k bias) stays zero."""
    return {part: bias for part, bias in outside_biases(attention).items() if isinstance(bias, nn.Parameter)}
