"""The built-in variants: projections that stand where timm keeps its attention's Linear layers.

A projection maps (B, N, C) to one or more named parts laid side by side, (B, N, sum of sizes): q, k and v for timm's
fused `qkv`, one of them where timm keeps them apart, `out` for the output projection. Whatever a variant stores, it
offers `weight` (out, in), `bias`, `in_features` and `out_features` as nn.Linear does, because some timm classes call
`F.linear(x, self.qkv.weight, ...)`.

"Linear attention" is the field's name for O(N) kernels, so the variants are called projections.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.layout import Layout
from zoo.registry import register_attention

KINDS = ("weight", "bias")
_STORED_NAMES = {"out": "projection"}


def stored_name(part: str) -> str:
    """Return how a part is called in storage: `to_q`, `to_k`, `to_v`, and `projection` for the output."""
    return _STORED_NAMES.get(part, f"to_{part}")


@dataclass(frozen=True)
class ProjectionSpec:
    """What a projection must hold.

    Attributes:
        in_features: Width of the input, C.
        layout: The parts, their widths and their order in the output.
        bias: Whether every part has a bias.
        device: Where the storage lives; None is torch's default.
        dtype: Its type; None is torch's default.
    """

    in_features: int
    layout: Layout
    bias: bool = True
    device: torch.device | None = None
    dtype: torch.dtype | None = None


class Projection(nn.Module):
    """A stand-in for nn.Linear that keeps each part (q, k, v or out) as a tensor of its own.

    The storage is uninitialised: whoever builds a projection fills it (`zoo.init`, or a copy of other weights).
    """

    transposed = False  # whether a weight is stored (in, out), for `x @ W`

    def __init__(self, spec: ProjectionSpec) -> None:
        super().__init__()
        self.in_features, self.layout = spec.in_features, spec.layout
        self._allocate(spec)
        self.register_load_state_dict_pre_hook(_split_linear_keys)  # type: ignore[no-untyped-call]

    @classmethod
    def build(cls, spec: ProjectionSpec) -> nn.Module:
        """Return an uninitialised module for this spec; a variant may answer with a plain nn.Linear."""
        return cls(spec)

    @abstractmethod
    def _allocate(self, spec: ProjectionSpec) -> None:
        """Create the parameters of every part."""

    @abstractmethod
    def stored_key(self, part: str, kind: str) -> str:
        """Return the state_dict key, below this module, of a part's `weight` or `bias`."""

    def part_parameter(self, part: str, kind: str) -> nn.Parameter | None:
        """Return the Parameter that stores a part's `weight` or `bias`; None where the part has no bias."""
        owner, _, leaf = self.stored_key(part, kind).rpartition(".")
        return self.get_submodule(owner)._parameters[leaf]

    def part_tensors(self, kind: str) -> dict[str, Tensor]:
        """Return each part's `weight` (out, in) or `bias` (out,) as views of the storage; empty without a bias."""
        stored = {part: self.part_parameter(part, kind) for part in self.layout.parts}
        turned = kind == "weight" and self.transposed
        return {part: tensor.t() if turned else tensor for part, tensor in stored.items() if tensor is not None}

    @property
    def out_features(self) -> int:
        """Width of the output, all parts together."""
        return self.layout.total

    @property
    def weight(self) -> Tensor:
        """All parts as nn.Linear would hold them, (out, in): a view of a single part, a new tensor of several."""
        if not self.transposed:
            return self.layout.join(self.part_tensors("weight"))
        # joined as they are stored: a copy that transposes costs up to a quarter of a product of few tokens
        stored = {part: tensor.t() for part, tensor in self.part_tensors("weight").items()}
        return self.layout.join(stored, dim=1).t()

    @property
    def bias(self) -> Tensor | None:
        """All parts' biases, (out,), or None."""
        biases = self.part_tensors("bias")
        return self.layout.join(biases) if biases else None

    def forward(self, x: Tensor) -> Tensor:
        """Project (B, N, in) to (B, N, out), in one matrix product however many parts there are."""
        return F.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Name the widths, as nn.Linear does."""
        parts = ", ".join(f"{name}={size}" for name, size in self.layout.sizes.items())
        by_head = f", {self.layout.num_heads} heads" if self.layout.num_heads > 1 else ""
        return f"in_features={self.in_features}, {parts}{by_head}, bias={self.bias is not None}"


@register_attention("linear")
class LinearProjection(Projection):
    """timm's own form: one nn.Linear for all parts. `build` answers with exactly that, so timm's names stay."""

    @classmethod
    def build(cls, spec: ProjectionSpec) -> nn.Module:
        """Return an nn.Linear(in_features, sum of the parts) whose storage is uninitialised."""
        with torch.device("meta"):  # no draw: the swap must leave the random stream as it was
            linear = nn.Linear(spec.in_features, spec.layout.total, bias=spec.bias, dtype=spec.dtype)
        return linear.to_empty(device=spec.device or torch.get_default_device())


@register_attention("separate")
class SeparateProjection(Projection):
    """Three nn.Linear, `to_q`, `to_k` and `to_v`; a single part stays the nn.Linear that timm has."""

    @classmethod
    def build(cls, spec: ProjectionSpec) -> nn.Module:
        """Return separate Linear layers, or one nn.Linear where there is nothing to separate."""
        return cls(spec) if len(spec.layout.parts) > 1 else LinearProjection.build(spec)

    def _allocate(self, spec: ProjectionSpec) -> None:
        for part, size in spec.layout.sizes.items():
            one = ProjectionSpec(spec.in_features, Layout({part: size}), spec.bias, spec.device, spec.dtype)
            self.add_module(stored_name(part), LinearProjection.build(one))

    def stored_key(self, part: str, kind: str) -> str:
        """Return `to_q.weight` and the like."""
        return f"{stored_name(part)}.{kind}"


@register_attention("parameter")
class ParameterProjection(Projection):
    """Raw matrices (in, out), used as `x @ W`: `to_q`, `to_k`, `to_v`, or `projection` for the output.

    `F.linear` on `W.t()` is `x @ W` to the last bit, and one product for q, k and v costs what timm's own does. It is
    timm's own product to the last bit too wherever the matrix library rounds `x @ W` as it rounds `x @ W.t().t()`: seen
    on CPUs for every size from 17 tokens up; at 10 rows or fewer two threads share the sums otherwise (3e-7).
    """

    transposed = True

    def _allocate(self, spec: ProjectionSpec) -> None:
        where = {"device": spec.device, "dtype": spec.dtype}
        for part, size in spec.layout.sizes.items():
            name = stored_name(part)
            self.register_parameter(name, nn.Parameter(torch.empty(spec.in_features, size, **where)))  # type: ignore[arg-type]
            offset = nn.Parameter(torch.empty(size, **where)) if spec.bias else None  # type: ignore[arg-type]
            self.register_parameter(f"{name}_bias", offset)  # 1-D, so that weight decay leaves it alone

    def stored_key(self, part: str, kind: str) -> str:
        """Return `to_q`, `to_q_bias` and the like."""
        return stored_name(part) if kind == "weight" else f"{stored_name(part)}_bias"


def part_tensors(module: nn.Module, layout: Layout, kind: str) -> dict[str, Tensor]:
    """Return each part's `weight` (out, in) or `bias` (out,) of a projection or an nn.Linear; empty without a bias.

    Views of the module's storage, but for an nn.Linear that holds several parts head by head.
    """
    if isinstance(module, Projection):
        return module.part_tensors(kind)
    fused = module._parameters[kind]
    return {} if fused is None else layout.split(fused)


@torch.no_grad()
def fill_parts(module: nn.Module, layout: Layout, kind: str, values: Mapping[str, Tensor]) -> None:
    """Copy values, (out, in) or (out,) by part, into the storage of a projection or an nn.Linear; {} does nothing."""
    if isinstance(module, Projection):
        for part, target in module.part_tensors(kind).items():
            target.copy_(values[part])
    elif values:
        module.get_parameter(kind).copy_(layout.join(values))


def part_parameter(module: nn.Module, part: str, kind: str) -> nn.Parameter | None:
    """Return the Parameter in which a projection or an nn.Linear stores a part's `weight` or `bias`."""
    if isinstance(module, Projection):
        return module.part_parameter(part, kind)
    return module._parameters[kind]


def put_part_parameter(module: nn.Module, part: str, kind: str, tensor: nn.Parameter) -> None:
    """Let `tensor` be the Parameter in which a projection or an nn.Linear stores a part's `weight` or `bias`."""
    key = module.stored_key(part, kind) if isinstance(module, Projection) else kind
    owner, _, leaf = key.rpartition(".")
    module.get_submodule(owner)._parameters[leaf] = tensor


def _split_linear_keys(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Let a stock timm state_dict load: turn `weight` and `bias` of an nn.Linear into the parts stored here.

    torch hands over a dict of its own, so the caller's stays as it is. A wrong shape gets the message that an
    nn.Linear would give; with strict=False too, where leaving the key would silently load nothing.
    """
    assert isinstance(module, Projection)
    metadata, errors = rest[0], rest[-1]
    for kind in KINDS:
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
        for part, piece in module.layout.split(fused).items():
            turned = piece.t() if kind == "weight" and module.transposed else piece
            if metadata.get("assign_to_params_buffers", False):  # these tensors become the parameters
                turned = turned.clone(memory_format=torch.contiguous_format)
            state_dict[prefix + module.stored_key(part, kind)] = turned
