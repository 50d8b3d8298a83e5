"""The built-in variants: projections that stand where timm keeps its attention's Linear layers.

A projection maps (B, N, C) to one or more named parts laid side by side, (B, N, sum of sizes): q, k and v for timm's
fused `qkv`, one of them where timm keeps them apart, `out` for the output projection. Whatever a variant stores, it
offers `weight` (out, in), `bias`, `in_features` and `out_features` as nn.Linear does, because some timm classes call
`F.linear(x, self.qkv.weight, ...)`.

"Linear attention" is the field's name for O(N) kernels, so the variants are called projections.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.registry import register_attention

STORED_NAMES = {"q": "to_q", "k": "to_k", "v": "to_v", "out": "projection"}


class Projection(nn.Module):
    """A stand-in for nn.Linear that keeps each part (q, k, v or out) as a tensor of its own.

    Args:
        in_features: Width of the input, C.
        parts: Output width of each part, in the order of the fused output.
        bias: Whether every part has a bias.
        device: Where the storage lives.
        dtype: Its type.

    The storage is uninitialised: whoever builds a projection fills it (`zoo.init`, or a copy of other weights).
    """

    transposed = False  # whether a weight is stored (in, out), for `x @ W`

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.parts = dict(parts)
        self._allocate(bias=bias, device=device, dtype=dtype)
        self.register_load_state_dict_pre_hook(_split_linear_keys)  # type: ignore[no-untyped-call]

    @classmethod
    def build(
        cls,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> nn.Module:
        """Return an uninitialised module for these parts; a variant may answer with a plain nn.Linear."""
        return cls(in_features, parts, bias=bias, device=device, dtype=dtype)

    @abstractmethod
    def _allocate(self, *, bias: bool, device: torch.device | None, dtype: torch.dtype | None) -> None:
        """Create the parameters of every part."""

    @abstractmethod
    def stored_key(self, part: str, kind: str) -> str:
        """Return the state_dict key, below this module, of a part's `weight` or `bias`."""

    def part_parameter(self, part: str, kind: str) -> nn.Parameter | None:
        """Return the Parameter that stores a part's `weight` or `bias`; None where the part has no bias."""
        owner, _, leaf = self.stored_key(part, kind).rpartition(".")
        return self.get_submodule(owner)._parameters[leaf]

    @abstractmethod
    def part_weights(self) -> dict[str, Tensor]:
        """Return each part's weight as a view, (out, in)."""

    @abstractmethod
    def part_biases(self) -> dict[str, Tensor | None]:
        """Return each part's bias, (out,), or None."""

    @property
    def out_features(self) -> int:
        """Width of the output, all parts together."""
        return sum(self.parts.values())

    @property
    def weight(self) -> Tensor:
        """All parts as nn.Linear would hold them, (out, in): a view of a single part, a concatenation of several."""
        weights = list(self.part_weights().values())
        return weights[0] if len(weights) == 1 else torch.cat(weights)

    @property
    def bias(self) -> Tensor | None:
        """All parts' biases, (out,), or None."""
        biases = [b for b in self.part_biases().values() if b is not None]
        if not biases:
            return None
        return biases[0] if len(biases) == 1 else torch.cat(biases)

    def forward(self, x: Tensor) -> Tensor:
        """Project (B, N, in) to (B, N, out), in one matrix product however many parts there are."""
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Name the widths, as nn.Linear does."""
        parts = ", ".join(f"{name}={size}" for name, size in self.parts.items())
        return f"in_features={self.in_features}, {parts}, bias={self.bias is not None}"


@register_attention("linear")
class LinearProjection(Projection):
    """timm's own form: one nn.Linear for all parts. `build` answers with exactly that, so timm's names stay."""

    @classmethod
    def build(
        cls,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> nn.Module:
        """Return an nn.Linear(in_features, sum of the parts) whose storage is uninitialised."""
        with torch.device("meta"):  # no draw: the swap must leave the random stream as it was
            linear = nn.Linear(in_features, sum(parts.values()), bias=bias, dtype=dtype)
        return linear.to_empty(device=device or torch.get_default_device())


@register_attention("separate")
class SeparateProjection(Projection):
    """Three nn.Linear, `to_q`, `to_k` and `to_v`; a single part stays the nn.Linear that timm has."""

    @classmethod
    def build(
        cls,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> nn.Module:
        """Return separate Linear layers, or one nn.Linear where there is nothing to separate."""
        build = super().build if len(parts) > 1 else LinearProjection.build
        return build(in_features, parts, bias=bias, device=device, dtype=dtype)

    def _allocate(self, *, bias: bool, device: torch.device | None, dtype: torch.dtype | None) -> None:
        for name, size in self.parts.items():
            linear = LinearProjection.build(self.in_features, {name: size}, bias=bias, device=device, dtype=dtype)
            self.add_module(STORED_NAMES[name], linear)

    def stored_key(self, part: str, kind: str) -> str:
        """Return `to_q.weight` and the like."""
        return f"{STORED_NAMES[part]}.{kind}"

    def part_weights(self) -> dict[str, Tensor]:
        """Return each Linear's weight, (out, in)."""
        return {part: getattr(self, STORED_NAMES[part]).weight for part in self.parts}

    def part_biases(self) -> dict[str, Tensor | None]:
        """Return each Linear's bias, (out,), or None."""
        return {part: getattr(self, STORED_NAMES[part]).bias for part in self.parts}


@register_attention("parameter")
class ParameterProjection(Projection):
    """Raw matrices (in, out), used as `x @ W`: `to_q`, `to_k`, `to_v`, or `projection` for the output.

    `F.linear` on `W.t()` is `x @ W` to the last bit, and one product for q, k and v costs what timm's own does. It is
    timm's own product to the last bit too wherever the matrix library rounds `x @ W` as it rounds `x @ W.t().t()`: seen
    on CPUs for every size from 17 tokens up; at 10 rows or fewer two threads share the sums otherwise (3e-7).
    """

    transposed = True

    def _allocate(self, *, bias: bool, device: torch.device | None, dtype: torch.dtype | None) -> None:
        for name, size in self.parts.items():
            stored = STORED_NAMES[name]
            raw = torch.empty(self.in_features, size, device=device, dtype=dtype)
            self.register_parameter(stored, nn.Parameter(raw))
            offset = nn.Parameter(torch.empty(size, device=device, dtype=dtype)) if bias else None
            self.register_parameter(f"{stored}_bias", offset)  # 1-D, so that weight decay leaves it alone

    def stored_key(self, part: str, kind: str) -> str:
        """Return `to_q`, `to_q_bias` and the like."""
        return STORED_NAMES[part] if kind == "weight" else f"{STORED_NAMES[part]}_bias"

    @property
    def weight(self) -> Tensor:
        """All parts as nn.Linear would hold them, (out, in): a view of a single part, a concatenation of several."""
        raws = [getattr(self, STORED_NAMES[part]) for part in self.parts]
        # joined as they are stored: a copy that transposes costs up to a quarter of a product of few tokens
        joined: Tensor = raws[0] if len(raws) == 1 else torch.cat(raws, dim=1)
        return joined.t()

    def part_weights(self) -> dict[str, Tensor]:
        """Return the transposed view of each matrix, (out, in)."""
        return {part: getattr(self, STORED_NAMES[part]).t() for part in self.parts}

    def part_biases(self) -> dict[str, Tensor | None]:
        """Return each part's bias, (out,), or None."""
        return {part: getattr(self, f"{STORED_NAMES[part]}_bias") for part in self.parts}


def part_weights(module: nn.Module, parts: Mapping[str, int]) -> dict[str, Tensor]:
    """Return each part's weight of a projection or an nn.Linear as a view, (out, in)."""
    if isinstance(module, Projection):
        return module.part_weights()
    return dict(zip(parts, torch.split(module.get_parameter("weight"), list(parts.values())), strict=True))


def part_biases(module: nn.Module, parts: Mapping[str, int]) -> dict[str, Tensor | None]:
    """Return each part's bias of a projection or an nn.Linear as a view, (out,), or None."""
    if isinstance(module, Projection):
        return module.part_biases()
    bias = module.bias
    if not isinstance(bias, Tensor):
        return dict.fromkeys(parts)
    return dict(zip(parts, torch.split(bias, list(parts.values())), strict=True))


def part_parameter(module: nn.Module, part: str, kind: str) -> nn.Parameter | None:
    """Return the Parameter in which a projection or an nn.Linear stores a part's `weight` or `bias`."""
    if isinstance(module, Projection):
        return module.part_parameter(part, kind)
    return module._parameters[kind]


def _split_linear_keys(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Let a stock timm state_dict load: turn `weight` and `bias` of an nn.Linear into the parts stored here.

    torch hands over a dict of its own, so the caller's stays as it is. A wrong shape gets the message that an
    nn.Linear would give; with strict=False too, where leaving the key would silently load nothing.
    """
    assert isinstance(module, Projection)
    metadata, errors = rest[0], rest[-1]
    for kind in ("weight", "bias"):
        fused, own = state_dict.get(prefix + kind), getattr(module, kind)
        if not isinstance(fused, Tensor) or own is None:
            continue  # torch names the key as missing or unexpected
        del state_dict[prefix + kind]
        if fused.shape != own.shape:
            errors.append(
                f"size mismatch for {prefix}{kind}: copying a param with shape {fused.shape} from checkpoint, "
                f"the shape in current model is {own.shape}."
            )
            fused = own
        for part, piece in zip(module.parts, torch.split(fused, list(module.parts.values())), strict=True):
            turned = piece.t() if kind == "weight" and module.transposed else piece
            if metadata.get("assign_to_params_buffers", False):  # these tensors become the parameters
                turned = turned.clone(memory_format=torch.contiguous_format)
            state_dict[prefix + module.stored_key(part, kind)] = turned
