"""Matrices kept as raw parameters in a module of any class, and drawn as if they were tokens: nn.Parameter(randn)."""

import math
from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from zoo.auditing.findings import Finding
from zoo.auditing.snapshots import readable_values
from zoo.projections import Projection

# Their weights have a draw, or a scale check, of their own.
_KNOWN = (nn.Linear, nn.Bilinear, _ConvNd, nn.Embedding, nn.EmbeddingBag, Projection)
_NARROW = 16  # a smaller side is a head's, a class's or a window's: no width of tokens
_MANY = 2  # one alone may be a table of positions, which is drawn as it likes
_WIDE = 4.0  # times 1/sqrt(fan_in), where nn.Linear draws 0.58 and torch.randn sqrt(fan_in)
_LISTED = 4


def check_raw_matrices(model: nn.Module) -> Iterator[Finding]:
    """Find modules with two or more raw matrices whose values spread far wider than a product with them bears."""
    for path, module in model.named_modules():
        if isinstance(module, _KNOWN):
            continue
        wide = {}
        for name, parameter in module.named_parameters(recurse=False):
            std = _find_std(parameter)
            if std * math.sqrt(min(parameter.shape, default=0)) > _WIDE:
                wide[name] = parameter, std
        if len(wide) >= _MANY:
            yield Finding("scale", "warning", path, _describe(wide))


def _find_std(parameter: Tensor) -> float:
    """Return the standard deviation of a matrix; 0.0 for what is none, or has no finite values."""
    if parameter.ndim != 2 or min(parameter.shape) < _NARROW or parameter.is_meta:
        return 0.0
    if not parameter.is_floating_point():
        return 0.0
    std = float(readable_values(parameter).float().std(correction=0))
    return std if math.isfinite(std) else 0.0


def _describe(wide: dict[str, tuple[Tensor, float]]) -> str:
    told = []
    for name, (parameter, std) in list(wide.items())[:_LISTED]:
        fan_in = min(parameter.shape)
        told.append(f"{name} has std {std:.3g} (expected 1/sqrt(3*{fan_in}) = {1 / math.sqrt(3 * fan_in):.3g})")
    others = f", and {len(wide) - _LISTED} others" if len(wide) > _LISTED else ""
    return (
        f"raw matrices are drawn far too wide: {', '.join(told)}{others}: their products swamp what follows, and "
        "softmax picks one token from the start; draw them as nn.Linear does: nn.init.normal_(parameter, std=expected)"
    )
