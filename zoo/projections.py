"""The built-in variants: projections that stand where timm keeps its attention's Linear layers.

A projection maps (B, N, C) to one or more named parts laid side by side, (B, N, sum of sizes): q, k and v for timm's
fused `qkv`, one of them where timm keeps them apart, `out` for the output projection. Whatever a variant stores, it
offers `weight` (out, in), `bias`, `in_features` and `out_features` as nn.Linear does, because some timm classes call
`F.linear(x, self.qkv.weight, ...)`.

"Linear attention" is the field's name for O(N) kernels, so the variants are called projections.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.errors import ZooError
from zoo.joined import Joined
from zoo.layout import Layout
from zoo.linear_keys import split_linear_keys
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


class Projection(nn.Linear):
    """An nn.Linear that keeps each part (q, k, v or out) as a tensor of its own.

    It is an nn.Linear so that code which looks for one meets it: timm's `init_weights` draws it as it draws timm's own.
    The storage is uninitialised: whoever builds a projection fills it (`zoo.init`, or a copy of other weights).
    """

    transposed = False  # whether a weight is stored (in, out), for `x @ W`

    def __init__(self, spec: ProjectionSpec) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would make and draw a weight
        self.in_features, self.out_features, self.layout = spec.in_features, spec.layout.total, spec.layout
        self._allocate(spec)
        self.register_load_state_dict_pre_hook(split_linear_keys)  # type: ignore[no-untyped-call]

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
        """Return the Parameter that stores a part's `weight` or `bias`; None where the part has no bias.

        Raises:
            ZooError: If something computes it instead (`parametrize`, `prune`).
        """
        key = self.stored_key(part, kind)
        owner, _, leaf = key.rpartition(".")
        stored = self.get_submodule(owner)._parameters
        if leaf not in stored:
            raise ZooError(f"{key} is no parameter of {type(self).__name__} now: remove what computes it first")
        return stored[leaf]

    def part_tensors(self, kind: str) -> dict[str, Tensor]:
        """Return each part's `weight` (out, in) or `bias` (out,) as views of the storage; empty without a bias.

        Where something computes a part (`parametrize`, `prune`), what it computes.
        """
        turned = kind == "weight" and self.transposed
        return {part: tensor.t() if turned else tensor for part, tensor in self._stored(kind).items()}

    def _stored(self, kind: str) -> dict[str, Tensor]:
        """Return each part's tensor as it is stored, or computed instead; empty without a bias."""
        read = {part: self._read(self.stored_key(part, kind)) for part in self.layout.parts}
        return {part: tensor for part, tensor in read.items() if tensor is not None}

    def _read(self, key: str) -> Any:
        value: Any = self
        for leaf in key.split("."):
            value = getattr(value, leaf)
        return value

    @property
    def weight(self) -> Tensor:
        """All parts as nn.Linear would hold them, (out, in); a write in place lands in the storage."""
        return self._join_for_writes("weight")

    @weight.setter
    def weight(self, value: object) -> None:
        raise self._refusal("weight", value)

    @property  # type: ignore[override]
    def bias(self) -> Tensor | None:
        """All parts' biases, (out,), or None; a write in place lands in the storage."""
        return self._join_for_writes("bias") if self.part_tensors("bias") else None

    @bias.setter
    def bias(self, value: object) -> None:
        raise self._refusal("bias", value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter of a part; refuse one in place of `weight` or `bias`, as `module.weight = ...` is."""
        if name in KINDS:
            raise self._refusal(name, param)
        super().register_parameter(name, param)

    def forward(self, x: Tensor) -> Tensor:
        """Project (B, N, in) to (B, N, out), in one matrix product however many parts there are."""
        biases = self._stored("bias")
        return F.linear(x, self._join("weight"), self.layout.join(biases) if biases else None)

    def _join(self, kind: str) -> Tensor:
        """Return all parts' `weight` (out, in) or `bias` (out,): a view of a single part, a new tensor of several."""
        tensors = self._stored(kind)
        if kind == "bias" or not self.transposed:
            return self.layout.join(tensors)
        # joined as they are stored: a copy that transposes costs up to a quarter of a product of few tokens
        return self.layout.join(tensors, dim=1).t()

    def _join_for_writes(self, kind: str) -> Tensor:
        def land(whole: Tensor) -> None:
            fill_parts(self, self.layout, kind, self.layout.split(whole))

        return Joined.of(lambda: self._join(kind), land, copied=len(self.layout.parts) > 1)

    def _refusal(self, kind: str, value: object) -> ZooError:
        stored = ", ".join(self.stored_key(part, kind) for part in self.layout.parts)
        return ZooError(
            f"{type(self).__name__}.{kind} cannot become another {type(value).__name__}: it is stored as {stored}; "
            f"copy into it (with torch.no_grad(): module.{kind}.copy_(...)), or call restore_attention(model) first"
        )

    def __prepare_scriptable__(self) -> nn.Module:
        """Refuse torch.jit.script, which has no way to compile a projection and would say so in pages."""
        raise ZooError(
            f"torch.jit.script cannot compile {type(self).__name__}: call restore_attention(model) first, which keeps "
            "the function, or use torch.export or torch.jit.trace"
        )

    def extra_repr(self) -> str:
        """Name the widths, as nn.Linear does."""
        parts = ", ".join(f"{name}={size}" for name, size in self.layout.sizes.items())
        by_head = f", {self.layout.num_heads} heads" if self.layout.num_heads > 1 else ""
        return f"in_features={self.in_features}, {parts}{by_head}, bias={bool(self.part_tensors('bias'))}"


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

    def forward(self, x: Tensor) -> Tensor:
        """Project (B, N, in) to (B, N, out): in one product, unless a layer inside was given hooks or was replaced."""
        layers = {part: getattr(self, stored_name(part)) for part in self.layout.parts}
        if all(type(layer) is nn.Linear and not _hooked(layer) for layer in layers.values()):
            return super().forward(x)
        return self.layout.join({part: layer(x) for part, layer in layers.items()}, dim=x.dim() - 1)

    # The layers inside hold the parts of one. Who walks a model to treat its layers (timm's init
    # functions, a quantizer) meets the projection, an nn.Linear itself, and would treat its parts a second time.

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield nothing: a projection is one layer."""
        return iter(())

    def children(self) -> Iterator[nn.Module]:
        """Yield the layers inside, by which torch moves, casts and switches modes."""
        return iter(cast(nn.Module, module) for module in self._modules.values())

    def apply(self, fn: Callable[[nn.Module], object]) -> Self:
        """Apply `fn` to the projection alone."""
        fn(self)
        return self


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


def _hooked(layer: nn.Module) -> bool:
    """Say whether calling the layer does more than its product (`prune` and `weight_norm` work by hooks)."""
    return bool(layer._forward_pre_hooks or layer._forward_hooks or layer._backward_pre_hooks or layer._backward_hooks)


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
        for part in module.layout.parts:
            module.part_parameter(part, kind)  # raises where there is no storage to copy into
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
