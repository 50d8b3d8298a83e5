"""The stand-alone attention module: multi-head self-attention built from any registered projection."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.errors import SwapError, ZooError
from zoo.init import init_attention
from zoo.layout import Layout
from zoo.projections import Projection, ProjectionSpec
from zoo.registry import find_attention
from zoo.slots import qualified_name
from zoo.timm_map import PLAIN


@dataclass(frozen=True)
class AttentionSpec:
    """What an attention module is, so that a variant of another kind can stand in for it.

    Attributes:
        dim: Width of the tokens, C.
        num_heads: Number of heads, H.
        head_dim: Width of a head, D.
        qkv_bias: Whether q, k and v have biases.
        project_out: Whether there is an output projection.
        out_bias: Whether it has a bias.
        attn_drop: Probability of dropping an attention weight.
        proj_drop: Probability of dropping an output.
        norms: Those of `NORMS` that do something: norms of q and k over D, and of the mixed values before the output
            projection. `zoo.Attention` takes the very modules over.
        extras: What else the module does, in words; a variant that cannot do it refuses.
    """

    NORMS: ClassVar = ("q_norm", "k_norm", "norm")

    dim: int = 0
    num_heads: int = 0
    head_dim: int = 0
    qkv_bias: bool = False
    project_out: bool = True
    out_bias: bool = True
    attn_drop: float = 0.0
    proj_drop: float = 0.0
    norms: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()

    @classmethod
    def read(cls, attention: nn.Module) -> Self:
        """Read the spec off timm's `Attention` or ours; of another class, all that it does is an extra."""
        if not isinstance(attention, Attention) and qualified_name(attention) != PLAIN:
            return cls(extras=(f"what {type(attention).__name__} does",))
        qkv, proj, head_dim = attention.get_submodule("qkv"), attention.get_submodule("proj"), attention.head_dim
        assert isinstance(head_dim, int)
        assert isinstance(attention.num_heads, int)
        assert isinstance(qkv.in_features, int)
        extras = []
        if getattr(attention, "gate", None) is not None:
            extras.append("the gate on its output")
        if attention.scale != head_dim**-0.5:
            extras.append(f"a scale of {attention.scale}")
        if not isinstance(proj, nn.Identity) and proj.out_features != qkv.in_features:
            extras.append(f"an output of another width, {proj.out_features}")
        return cls(
            dim=qkv.in_features,
            num_heads=attention.num_heads,
            head_dim=head_dim,
            qkv_bias=qkv.bias is not None,
            project_out=not isinstance(proj, nn.Identity),
            out_bias=getattr(proj, "bias", None) is not None,
            attn_drop=_rate(attention, "attn_drop"),
            proj_drop=_rate(attention, "proj_drop"),
            norms=tuple(
                name for name in cls.NORMS if not isinstance(getattr(attention, name, None), nn.Identity | None)
            ),
            extras=tuple(extras),
        )


def _rate(attention: nn.Module, name: str) -> float:
    drop = getattr(attention, name)
    rate = drop.p if isinstance(drop, nn.Dropout) else 0.0
    assert isinstance(rate, float | int)
    return float(rate)


class Attention(nn.Module):
    """Multi-head self-attention (Vaswani et al. 2017), its projections kept as a registered variant keeps them.

    A class derived from it and registered is a variant that replaces whole attention modules. It overrides `attend`,
    what happens between the projections; it may have parameters of its own.

    Args:
        dim: Width of the tokens, C.
        num_heads: Number of heads, H.
        head_dim: Width of a head, D.
        variant: A registered projection: "linear", "separate" or "parameter".
        project_out: "auto" leaves the output projection out where it would be idle (one head as wide as the tokens);
            "always" and "never" say so. Left out means nn.Identity: no parameter exists, so DDP has none to wait for.
        qkv_bias: Whether q, k and v have biases.
        out_bias: Whether the output projection has one.
        dropout: Probability in [0, 1) of dropping an attention weight, and of dropping an output.

    Raises:
        UnknownNameError: If the variant is not registered.
        ZooError: If a number is out of range, or tokens of another width would leave without a projection.
    """

    projection: ClassVar[str] = "linear"
    """How a derived variant keeps its projections when it is swapped in."""

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        head_dim: int = 64,
        *,
        variant: str = "linear",
        project_out: Literal["auto", "always", "never"] = "auto",
        qkv_bias: bool = False,
        out_bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if min(dim, num_heads, head_dim) < 1:
            raise ZooError(f"dim, num_heads and head_dim must be at least 1, got {dim}, {num_heads}, {head_dim}")
        if not 0.0 <= dropout < 1.0:
            raise ZooError(f"dropout must be in [0, 1), got {dropout}")
        if project_out not in ("auto", "always", "never"):
            raise ZooError(f"project_out must be 'auto', 'always' or 'never', got {project_out!r}")
        projection = find_attention(variant)
        if not issubclass(projection, Projection):
            raise ZooError(f"variant {variant!r} is a whole module, not a projection")
        inner = num_heads * head_dim
        idle = num_heads == 1 and head_dim == dim
        projects = project_out == "always" or (project_out == "auto" and not idle)
        if not projects and inner != dim:
            raise ZooError(f"project_out='never' would return tokens of width {inner}, not dim {dim}")
        self.num_heads, self.head_dim, self.scale = num_heads, head_dim, head_dim**-0.5
        self.qkv = projection.build(ProjectionSpec(dim, Layout(dict.fromkeys(("q", "k", "v"), inner)), qkv_bias))
        out = ProjectionSpec(inner, Layout({"out": dim}), out_bias)
        self.proj = projection.build(out) if projects else nn.Identity()
        self.q_norm, self.k_norm, self.norm = nn.Identity(), nn.Identity(), nn.Identity()
        self.attn_drop, self.proj_drop = nn.Dropout(dropout), nn.Dropout(dropout)
        init_attention(self, "torch")

    @classmethod
    def check_spec(cls, spec: AttentionSpec, name: str) -> None:
        """Raise SwapError if this class cannot stand in for the attention module called `name`."""
        if spec.extras:
            raise SwapError(f"{name}: {cls.__name__} cannot honour {' and '.join(spec.extras)}")

    @classmethod
    def from_spec(cls, spec: AttentionSpec) -> Self:
        """Return a module for `spec`; the swap then moves projections and norms into it."""
        kwargs: dict[str, Any] = {"variant": cls.projection, "project_out": "always" if spec.project_out else "never"}
        made = cls(spec.dim, spec.num_heads, spec.head_dim, qkv_bias=spec.qkv_bias, out_bias=spec.out_bias, **kwargs)
        made.attn_drop.p, made.proj_drop.p = spec.attn_drop, spec.proj_drop
        return made

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:  # noqa: FBT001, FBT002
        """Let every token attend to every token.

        Args:
            x: Tokens, (B, N, C).
            attn_mask: Broadcastable to (B, H, N, N): True where a key may be seen, or a number added to the logits;
                None sees all.
            is_causal: Whether a token sees no later one; not beside a mask.

        Returns:
            Tokens, (B, N, C).
        """
        q, k, v = rearrange(self.qkv(x), "b n (three h d) -> three b h n d", three=3, h=self.num_heads)
        x = self.attend(self.q_norm(q), self.k_norm(k), v, attn_mask=attn_mask, is_causal=is_causal)
        x = self.norm(rearrange(x, "b h n d -> b n (h d)"))
        out: Tensor = self.proj_drop(self.proj(x))
        return out

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Mix values by scaled dot-product attention.

        Args:
            q: Queries, (B, H, N, D).
            k: Keys, (B, H, N, D).
            v: Values, (B, H, N, D).
            attn_mask: As for `forward`.
            is_causal: As for `forward`.

        Returns:
            Mixed values, (B, H, N, D).
        """
        dropout = self.attn_drop.p if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=dropout, is_causal=is_causal)
