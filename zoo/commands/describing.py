"""Measure a model's attention as it is stored, and hold it against the scheme that it was drawn by."""

import math
from collections.abc import Mapping

from torch import Tensor, nn

from zoo.auditing.scale import check_scale, measure_scale
from zoo.commands.description import DescribedAttention, Description, Spread, StoredParameter
from zoo.commands.oddities import find_notes
from zoo.init import check_scheme, expected_std
from zoo.projections import KINDS, part_parameter, part_tensors
from zoo.slots import find_places, find_row, iter_attentions, qualified_name


def describe(model: nn.Module, init: str | None = None, *, is_trained: bool = False) -> Description:
    """Describe every attention of a model whose class `zoo.timm_map` knows; changes nothing.

    Args:
        model: A timm model, swapped or stock, or any module with such attention.
        init: The scheme that the projections were drawn by, to hold their spread against; None and "timm" for weights
            that timm drew, which are held against those of the blocks around.
        is_trained: Whether the weights are no draw any more, and so are held against nothing.

    Returns:
        What is stored, and what stands out. `print` it for a table.

    Raises:
        UnknownNameError: If there is no such scheme.
    """
    if init is not None:
        check_scheme(init)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    scales = {row.name: row for row in measure_scale(model)}
    attentions = []
    for name, module in iter_attentions(model):
        parameters = _describe_parameters(module, name, init, names)
        scale = scales.get(name)
        heads = getattr(module, "num_heads", None)
        attentions.append(
            DescribedAttention(
                name=name,
                cls=qualified_name(module),
                dim=_read_dim(module),
                num_heads=scale.num_heads if scale else heads if isinstance(heads, int) else None,
                logit_std=scale.logit_std if scale else None,
                expected_logit_std=_expect_logits(module, init) if scale and not scale.bounded else None,
                entropy=scale.entropy if scale else None,
                normalised=scale.bounded if scale else False,
                parameters=parameters,
            )
        )
    extreme = {finding.tensor for finding in check_scale(tuple(scales.values()))}
    return Description(tuple(attentions), find_notes(attentions, None if is_trained else extreme))


def _describe_parameters(
    module: nn.Module, name: str, init: str | None, names: Mapping[int, list[str]]
) -> tuple[StoredParameter, ...]:
    parts = _spread_parts(module, init)
    prefix = f"{name}." if name else ""
    return tuple(
        StoredParameter(
            name=leaf,
            shape=tuple(parameter.shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
            parts=parts.get(id(parameter), {}),
            trainable=parameter.requires_grad,
            contiguous=parameter.is_contiguous(),
            tied_to=tuple(other for other in names[id(parameter)] if other != f"{prefix}{leaf}"),
        )
        for leaf, parameter in module.named_parameters()
    )


def _spread_parts(module: nn.Module, init: str | None) -> dict[int, dict[str, Spread]]:
    """Return the spread of every part, by the id of the parameter that holds it."""
    found: dict[int, dict[str, Spread]] = {}
    for place in find_places(module):
        if not place.holds_matrix:
            continue
        weights = part_tensors(place.child, place.layout, "weight")
        for kind in KINDS:
            for part, tensor in part_tensors(place.child, place.layout, kind).items():
                out, in_ = weights[part].shape
                expected = None if part == "mlp" else _expect_std(init, out, in_, kind)  # no scheme draws the MLP's
                called = part if kind == "weight" else f"{part}_bias"
                stored = part_parameter(place.child, part, kind)
                found.setdefault(id(stored), {})[called] = _measure(tensor, expected)
    row = find_row(module)
    assert row is not None
    for part, attribute in row.biases:
        bias = getattr(module, attribute, None)
        if isinstance(bias, nn.Parameter):
            found[id(bias)] = {
                f"{part}_bias": _measure(bias, _expect_std(init, bias.numel(), _read_dim(module), "bias"))
            }
    return found


def _measure(tensor: Tensor, expected: float | None) -> Spread:
    if tensor.is_meta or not tensor.numel():
        return Spread(None, expected, tensor.numel())
    std = tensor.detach().float().std(correction=0).item()
    return Spread(std if math.isfinite(std) else None, expected, tensor.numel())


def _expect_std(init: str | None, out: int, in_: int, kind: str) -> float | None:
    """Return the spread that a scheme gives a weight; or a bias, which all but torch's own set to 0."""
    weight = expected_std(init, out, in_)
    return weight if weight is None or kind == "weight" or init == "torch" else 0.0


def _expect_logits(module: nn.Module, init: str | None) -> float | None:
    """Return the logits' spread that a scheme gives for N(0, I) tokens: sqrt(C_k s_k^2 (C_q s_q^2 + s_bias^2))."""
    shapes: dict[str, tuple[int, int, bool]] = {}
    for place in find_places(module):
        for part, weight in part_tensors(place.child, place.layout, "weight").items() if place.holds_matrix else ():
            shapes[part] = (weight.shape[0], weight.shape[1], place.child.bias is not None)
    (q_out, q_in, has_bias), (k_out, k_in, _) = shapes["q"], shapes["k"]
    q, k, bias = (
        expected_std(init, q_out, q_in),
        expected_std(init, k_out, k_in),
        _expect_std(init, q_out, q_in, "bias"),
    )
    if q is None or k is None or bias is None:
        return None
    return math.sqrt(k_in * k**2 * (q_in * q**2 + (bias**2 if has_bias else 0.0)))


def _read_dim(module: nn.Module) -> int:
    """Return the width of the tokens that the first projection takes."""
    dim = find_places(module)[0].child.in_features
    assert isinstance(dim, int)
    return dim
