"""The scale of attention's weights: how far the logits spread and how many tokens a query looks at, before training.

For tokens x, y ~ N(0, I) the logit of one head is (x' Wq' + b') Wk y / sqrt(D), whose variance is
(||Wq' Wk||_F^2 + ||b' Wk||^2) / D exactly. torch's Linear gives a spread of 1/3 at any width, a unit normal draw of raw
matrices gives the width itself. Only classes whose logits are that, but for a bias by position, are measured: not
attention over channels, cosine attention, attention whose maps are mixed, gated or subtracted, or whose queries or keys
are pooled or normalised with statistics on the way.
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from zoo.auditing.findings import Finding
from zoo.weights import attention_weights

TOKENS = 65  # 64 patches and a class token: the uniform distribution over them has entropy 4.174
EXPECTED_LOGIT_STD = 1 / 3
# Each was held against the logits that its forward hands to softmax.
_DOT_PRODUCT = frozenset(
    {
        "zoo.attention.Attention",
        "timm.layers.attention.Attention",
        "timm.layers.attention.AttentionRope",
        "timm.models.beit.Attention",
        "timm.models.cait.ClassAttn",
        "timm.models.convit.MHSA",
        "timm.models.crossvit.CrossAttention",
        "timm.models.davit.WindowAttention",
        "timm.models.efficientformer.Attention",
        "timm.models.eva.EvaAttention",
        "timm.models.fastvit.Attention",
        "timm.models.gcvit.WindowAttentionGlobal",
        "timm.models.hiera.MaskUnitAttention",
        "timm.models.hieradet_sam2.MultiScaleAttention",
        "timm.models.maxxvit.AttentionCl",
        "timm.models.metaformer.Attention",
        "timm.models.nest.Attention",
        "timm.models.nextvit.EfficientAttention",
        "timm.models.pvt_v2.Attention",
        "timm.models.swin_transformer.WindowAttention",
        "timm.models.tiny_vit.Attention",
        "timm.models.tnt.Attention",
        "timm.models.twins.GlobalSubSampleAttn",
        "timm.models.twins.LocallyGroupedAttn",
        "timm.models.vision_transformer.ParallelScalingBlock",
        "timm.models.vision_transformer_relpos.RelPosAttention",
        "timm.models.vision_transformer_sam.Attention",
        "timm.models.volo.Attention",
        "timm.models.volo.ClassAttention",
    }
)
# Attributes, and the values for which queries and keys are those of single tokens: others pool or scale them.
_AS_IS: dict[str, tuple[object, ...]] = {
    "q_stride": (1,),
    "q_pool": (None,),
    "linear": (False,),
    "logit_scale": (None,),
    "temperature": (None,),
}
_POOLED_BY = {"timm.models.nextvit.EfficientAttention": "sr_ratio"}
_WIDE = 6.0  # times what nn.Linear draws: trained weights may give large logits, but by alignment, not by their size
_LOWEST, _HIGHEST = 1e-3, 4.0  # below, softmax is uniform to the last digits; above, it is a choice of one


@dataclass(frozen=True)
class ScaleRow:
    """One attention's scale, over all its heads.

    Attributes:
        name: The attention module's name.
        dim: Width of its tokens, the fan-in of q, k and v.
        num_heads: Its heads.
        q_std: Standard deviation of the query weights.
        k_std: Of the key weights.
        v_std: Of the value weights.
        expected_std: What torch's Linear draws, 1/sqrt(3 dim).
        logit_std: Spread of the attention logits over the keys for N(0, I) tokens, root mean square over heads and
            queries, without biases by position.
        entropy: Mean entropy in nats of the attention over 65 seeded N(0, I) tokens, between 0 and ln(65).
        bounded: Whether both q and k are normalised, which bounds the logits whatever the weights are.
    """

    name: str
    dim: int
    num_heads: int
    q_std: float
    k_std: float
    v_std: float
    expected_std: float
    logit_std: float
    entropy: float
    bounded: bool

    def __str__(self) -> str:
        return (
            f"{self.name}: heads={self.num_heads} std q={self.q_std:.3g} k={self.k_std:.3g} v={self.v_std:.3g} "
            f"(Linear {self.expected_std:.3g}) logit_std={self.logit_std:.3g} (Linear {EXPECTED_LOGIT_STD:.2f}) "
            f"entropy={self.entropy:.3f} of {math.log(TOKENS):.3f}{' q/k normalised' if self.bounded else ''}"
        )


@torch.no_grad()
def measure_scale(model: nn.Module) -> tuple[ScaleRow, ...]:
    """Measure every attention whose logits its q and k alone decide, on the CPU in float64; leave out the others."""
    rows = []
    for name, weights in attention_weights(model).items():
        attention = model.get_submodule(name)
        if not {"q", "k", "v"} <= weights.keys() or not _is_dot_product(attention):
            continue
        if any(tensor.is_meta for tensor in weights.values()):
            continue
        row = _measure(name, attention, {part: tensor.detach().cpu().float() for part, tensor in weights.items()})
        if row is not None and math.isfinite(row.logit_std):  # the audit names what is not finite
            rows.append(row)
    return tuple(rows)


def check_scale(rows: tuple[ScaleRow, ...]) -> Iterator[Finding]:
    """Find attention whose logits spread so far, or so little, that it can hardly learn from the start."""
    for row in rows:
        wide = max(row.q_std, row.k_std) > _WIDE * row.expected_std
        sharp, flat = wide and row.logit_std > _HIGHEST, row.logit_std < _LOWEST
        if row.bounded or not (sharp or flat):
            continue
        what = "attends to one token" if sharp else "attends to all tokens alike"
        yield Finding(
            "scale",
            "warning",
            row.name,
            f"attention logits have std {row.logit_std:.3g} (expected {EXPECTED_LOGIT_STD:.2f}), so it {what}: entropy "
            f"{row.entropy:.3f} of {math.log(TOKENS):.3f}; q has std {row.q_std:.3g}, k {row.k_std:.3g}, expected "
            f"1/sqrt(3*{row.dim}) = {row.expected_std:.3g}; draw them as nn.Linear does (init='torch')",
        )


def _is_dot_product(attention: nn.Module) -> bool:
    """Say whether softmax gets q'k / sqrt(D) of single tokens: by the class whose code it runs, and its settings."""
    owner = next(cls for cls in type(attention).__mro__ if {"forward", "attend"} & vars(cls).keys())
    name = f"{owner.__module__}.{owner.__qualname__}"
    settings = _AS_IS | ({_POOLED_BY[name]: (1,)} if name in _POOLED_BY else {})
    return name in _DOT_PRODUCT and all(
        getattr(attention, attribute, values[0]) in values for attribute, values in settings.items()
    )


def _measure(name: str, attention: nn.Module, weights: dict[str, Tensor]) -> ScaleRow | None:
    """Measure one attention; None if q and k are no whole heads of one width, or have a scale or norms of their own."""
    num_heads = _num_heads(attention, weights["q"])
    (rows, dim), key_shape = weights["q"].shape, weights["k"].shape
    if not num_heads or rows % num_heads or key_shape[1] != dim or key_shape[0] % (rows // num_heads):
        return None
    head_dim = rows // num_heads
    if num_heads % (key_shape[0] // head_dim):
        return None
    found = [_find_norm(attention, f"{part}_norm", (head_dim,)) for part in ("q", "k")]
    norms = [norm for norm in found if norm is not None]
    scale = getattr(attention, "scale", head_dim**-0.5)
    if len(norms) < len(found) or not (isinstance(scale, float) and math.isclose(scale, head_dim**-0.5)):
        return None
    logits = _sample_logits(weights, norms, num_heads, head_dim)  # (H, N, N)
    plain = [isinstance(norm, nn.Identity) for norm in norms]
    variance = _variance(weights, num_heads, head_dim) if all(plain) else logits.var(-1).mean(-1)  # (H,)
    return ScaleRow(
        name=name,
        dim=dim,
        num_heads=num_heads,
        q_std=float(weights["q"].std(correction=0)),
        k_std=float(weights["k"].std(correction=0)),
        v_std=float(weights["v"].std(correction=0)),
        expected_std=1 / math.sqrt(3 * dim),
        logit_std=float(variance.mean().sqrt()),
        entropy=float(torch.special.entr(logits.softmax(-1)).sum(-1).mean()),
        bounded=not any(plain),
    )


def _variance(weights: dict[str, Tensor], num_heads: int, head_dim: int) -> Tensor:
    q, k = (_per_head(weights[part], num_heads, head_dim) for part in ("q", "k"))  # (H, D, C)
    # ||Wq' Wk||_F^2 = <Wq Wq', Wk Wk'>: D x D instead of C x C
    total = ((q @ q.mT) * (k @ k.mT)).sum((1, 2))
    if "q_bias" in weights:
        bias = _per_head(weights["q_bias"][:, None], num_heads, head_dim)  # (H, D, 1)
        total += (bias.mT @ k).square().sum((1, 2))
    return total / head_dim  # (H,)


def _sample_logits(weights: dict[str, Tensor], norms: list[nn.Module], num_heads: int, head_dim: int) -> Tensor:
    x = torch.randn(TOKENS, weights["q"].shape[1], generator=torch.Generator().manual_seed(0)).double()  # (N, C)
    heads: list[Tensor] = []
    for part, norm in zip(("q", "k"), norms, strict=True):
        head = x @ _per_head(weights[part], num_heads, head_dim).mT  # (H, N, D)
        if f"{part}_bias" in weights:
            head = head + _per_head(weights[f"{part}_bias"][:, None], num_heads, head_dim).mT  # (H, 1, D)
        heads.append(cast(Tensor, norm(head)))
    return heads[0] @ heads[1].mT / math.sqrt(head_dim)


def _find_norm(attention: nn.Module, name: str, shape: tuple[int, ...]) -> nn.Module | None:
    """Return a copy, in float64 on the CPU, of the norm of a head; nn.Identity without one, None for another kind."""
    norm = getattr(attention, name, None)
    if norm is None or isinstance(norm, nn.Identity):
        return nn.Identity()
    fits = tuple(getattr(norm, "normalized_shape", ())) == shape
    return copy.deepcopy(norm).cpu().double() if fits else None


def _num_heads(attention: nn.Module, q: Tensor) -> int:
    """Read the number of heads off a module: its `num_heads`, or its `head_dim`; 0 if it has neither."""
    num_heads: int | None = getattr(attention, "num_heads", None)
    head_dim: int | None = getattr(attention, "head_dim", None)
    return num_heads or (q.shape[0] // head_dim if head_dim else 0)


def _per_head(weight: Tensor, num_heads: int, head_dim: int) -> Tensor:
    """Split (H*D, C) into (H, D, C); grouped keys are repeated for the queries that share them."""
    split = weight.double().reshape(-1, head_dim, weight.shape[1])
    return split.repeat_interleave(num_heads // split.shape[0], dim=0)
