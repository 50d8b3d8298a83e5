"""The scale of attention's weights: how far the logits spread and how many tokens a query looks at, before training.

For tokens x, y ~ N(0, I) the logit of one head is x' Wq' Wk y / sqrt(D), whose variance is ||Wq' Wk||_F^2 / D exactly.
torch's Linear gives a spread of 1/3 at any width, a unit normal draw of raw matrices gives the width itself.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zoo.findings import Finding
from zoo.weights import attention_weights

TOKENS = 65  # 64 patches and a class token: the uniform distribution over them has entropy 4.174
EXPECTED_LOGIT_STD = 1 / 3
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
        logit_std: Spread of the attention logits for N(0, I) tokens, root mean square over heads.
        entropy: Mean entropy in nats of the attention over 65 seeded N(0, I) tokens, between 0 and ln(65).
        bounded: Whether q and k are normalised, which bounds the logits whatever the weights are.
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
    """Measure every attention whose weights `zoo.attention_weights` can show, on the CPU in float32."""
    rows = []
    for name, weights in attention_weights(model).items():
        if {"q", "k", "v"} <= weights.keys() and not any(tensor.is_meta for tensor in weights.values()):
            host = {part: tensor.detach().float().cpu() for part, tensor in weights.items()}
            rows.append(_measure(name, model.get_submodule(name), host))
    return tuple(rows)


def check_scale(rows: tuple[ScaleRow, ...]) -> Iterator[Finding]:
    """Find attention whose logits spread so far, or so little, that it can hardly learn from the start."""
    for row in rows:
        if row.bounded or _LOWEST <= row.logit_std <= _HIGHEST:
            continue
        what = "attends to one token" if row.logit_std > _HIGHEST else "attends to all tokens alike"
        yield Finding(
            "scale",
            "warning",
            row.name,
            f"attention logits have std {row.logit_std:.3g} (expected {EXPECTED_LOGIT_STD:.2f}), so it {what}: entropy "
            f"{row.entropy:.3f} of {math.log(TOKENS):.3f}; q has std {row.q_std:.3g}, k {row.k_std:.3g}, expected "
            f"1/sqrt(3*{row.dim}) = {row.expected_std:.3g}; draw them as nn.Linear does (init='torch')",
        )


def _measure(name: str, attention: nn.Module, weights: dict[str, Tensor]) -> ScaleRow:
    num_heads = _num_heads(attention, weights["q"])
    dim, head_dim = weights["q"].shape[1], weights["q"].shape[0] // num_heads
    heads = {part: _per_head(weights[part], num_heads, head_dim) for part in ("q", "k")}  # (H, D, C)
    # ||Wq' Wk||_F^2 = <Wq Wq', Wk Wk'>: D x D instead of C x C
    grams = {part: head @ head.mT for part, head in heads.items()}  # (H, D, D)
    variance = (grams["q"] * grams["k"]).sum((1, 2)) / head_dim  # (H,)
    return ScaleRow(
        name=name,
        dim=dim,
        num_heads=num_heads,
        q_std=float(weights["q"].std(correction=0)),
        k_std=float(weights["k"].std(correction=0)),
        v_std=float(weights["v"].std(correction=0)),
        expected_std=1 / math.sqrt(3 * dim),
        logit_std=float(variance.mean().sqrt()),
        entropy=_entropy(weights, heads, num_heads, head_dim),
        bounded=any(
            not isinstance(getattr(attention, norm, None), nn.Identity | None) for norm in ("q_norm", "k_norm")
        ),
    )


def _entropy(weights: dict[str, Tensor], heads: dict[str, Tensor], num_heads: int, head_dim: int) -> float:
    x = torch.randn(TOKENS, weights["q"].shape[1], generator=torch.Generator().manual_seed(0))  # (N, C)
    q, k = (x @ head.mT for head in heads.values())  # (H, N, D)
    if "q_bias" in weights:
        q = (
            q + _per_head(weights["q_bias"][:, None], num_heads, head_dim).mT
        )  # (H, 1, D); a k bias leaves softmax as is
    attention = (q @ k.mT / math.sqrt(head_dim)).softmax(-1)  # (H, N, N)
    return float(torch.special.entr(attention).sum(-1).mean())


def _num_heads(attention: nn.Module, q: Tensor) -> int:
    """Read the number of heads off a module: its `num_heads`, or its `head_dim`, or else one."""
    num_heads, head_dim = getattr(attention, "num_heads", None), getattr(attention, "head_dim", None)
    if isinstance(num_heads, int):
        return num_heads
    return q.shape[0] // head_dim if isinstance(head_dim, int) else 1


def _per_head(weight: Tensor, num_heads: int, head_dim: int) -> Tensor:
    """Split (H*D, C) into (H, D, C); grouped keys are repeated for the queries that share them."""
    split = weight.reshape(-1, head_dim, weight.shape[1])
    return split.repeat_interleave(num_heads // split.shape[0], dim=0)
