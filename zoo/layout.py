"""How the parts of a projection (q, k, v, out) lie in the output of the one nn.Linear that timm fuses them into."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """The widths of a projection's parts, and their order.

    Attributes:
        sizes: Output width of each part, all heads together, in the order of the fused output.
        num_heads: 1 where the parts lie side by side (q of all heads, then k, then v); H where they lie head by head
            (q, k and v of the first head, then of the next), as in LeViT and TinyViT.
    """

    sizes: Mapping[str, int]
    num_heads: int = 1

    def __post_init__(self) -> None:
        uneven = [part for part, size in self.sizes.items() if size % self.num_heads]
        assert not uneven, f"{uneven} of {dict(self.sizes)} hold no {self.num_heads} heads of one width"

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts, in the order of the fused output."""
        return tuple(self.sizes)

    @property
    def total(self) -> int:
        """Width of the fused output."""
        return sum(self.sizes.values())

    def split(self, fused: Tensor) -> dict[str, Tensor]:
        """Return each part's rows of a fused weight (total, in) or bias (total,).

        Views of `fused` where the parts lie side by side; copies where they lie head by head.
        """
        if len(self.sizes) == 1:
            return {self.parts[0]: fused}
        if self.num_heads == 1:  # narrow, since the views of torch.split must not be written to
            starts = [0, *accumulate(self.sizes.values())]
            return {
                part: fused.narrow(0, start, size)
                for (part, size), start in zip(self.sizes.items(), starts, strict=False)
            }
        widths = [size // self.num_heads for size in self.sizes.values()]
        by_head = torch.split(_by_head(fused, 0, self.num_heads), widths, dim=1)  # each (H, width, ...)
        return {part: piece.flatten(0, 1) for part, piece in zip(self.sizes, by_head, strict=True)}

    def join(self, pieces: Mapping[str, Tensor], *, dim: int = 0) -> Tensor:
        """Return the fused tensor of the parts' tensors, laid along `dim`: itself if there is one part."""
        tensors = [pieces[part] for part in self.sizes]
        if len(tensors) == 1:
            return tensors[0]
        if self.num_heads == 1:
            return torch.cat(tensors, dim=dim)
        by_head = [_by_head(tensor, dim, self.num_heads) for tensor in tensors]
        return torch.cat(by_head, dim=dim + 1).flatten(dim, dim + 1)


def _by_head(tensor: Tensor, dim: int, num_heads: int) -> Tensor:
    """Split a dimension (H*D) into (H, D)."""
    return tensor.reshape(*tensor.shape[:dim], num_heads, -1, *tensor.shape[dim + 1 :])
