"""The stand-alone attention module: multi-head self-attention built from any registered projection."""

from typing import Literal

from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.errors import ZooError
from zoo.init import init_attention
from zoo.projections import Projection
from zoo.registry import find_attention


class Attention(nn.Module):
    """Multi-head self-attention (Vaswani et al. 2017), its projections kept as a registered variant keeps them.

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
        self.dropout = dropout
        self.qkv = projection.build(dim, dict.fromkeys(("q", "k", "v"), inner), bias=qkv_bias)
        self.proj = projection.build(inner, {"out": dim}, bias=out_bias) if projects else nn.Identity()
        self.proj_drop = nn.Dropout(dropout)
        init_attention(self, "torch")

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """Let every token attend to every token.

        Args:
            x: Tokens, (B, N, C).
            attn_mask: Broadcastable to (B, H, N, N): True where a key may be seen, or a number added to the logits;
                None sees all.

        Returns:
            Tokens, (B, N, C).
        """
        q, k, v = rearrange(self.qkv(x), "b n (three h d) -> three b h n d", three=3, h=self.num_heads)
        x = F.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, dropout_p=self.dropout if self.training else 0.0
        )
        x = rearrange(x, "b h n d -> b n (h d)")
        out: Tensor = self.proj_drop(self.proj(x))
        return out
