"""Swap whole attention modules: move the projections of one into another, and back."""

from collections.abc import Callable

from torch import nn

from zoo.attention import Attention, AttentionSpec
from zoo.errors import SwapError
from zoo.projections import Projection
from zoo.registry import find_attention
from zoo.swapping.refusals import check_unhooked

_ORIGIN = "_origin"
_MOVED = ("qkv", "proj", *AttentionSpec.NORMS)


class Origin:
    """The module that a whole-module variant stands for, its projections moved out: what a restore puts back.

    No container that nn.Module or the audit looks into, so that it is neither a child nor a lost tensor.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module


def is_whole(variant: type[nn.Module]) -> bool:
    """Say whether a variant replaces whole attention modules, not their projections alone."""
    return issubclass(variant, Attention)


def projection_of(variant: type[nn.Module]) -> type[Projection]:
    """Return the projection that a variant is, or that its whole module keeps its weights in.

    Raises:
        SwapError: If the class is neither a Projection nor a zoo.Attention.
    """
    if is_whole(variant):
        assert issubclass(variant, Attention)
        variant = find_attention(variant.projection)
    if not issubclass(variant, Projection):
        raise SwapError(
            f"{variant.__name__} is neither a zoo.projections.Projection nor a zoo.Attention, the only kinds of "
            "variant that a swap can place"
        )
    return variant


class Transplant:
    """A planned replacement of an attention module by another that takes over its projections.

    Attributes:
        is_idle: Whether the module stays, since the variant is a projection and timm's own module stands there.

    Raises:
        SwapError: If something of the module would be lost: hooks, parameters that only it has, or what the variant
            cannot honour.
    """

    def __init__(self, model: nn.Module, name: str, module: nn.Module, variant: type[nn.Module]) -> None:
        self._model, self._name, self._module = model, name, module
        self._variant = variant if issubclass(variant, Attention) else None
        origin = vars(module).get(_ORIGIN)
        self._base = origin.module if isinstance(origin, Origin) else module
        self.is_idle = self._base is module if self._variant is None else type(module) is self._variant
        if self.is_idle:
            return
        check_unhooked(name, module)
        self._spec = AttentionSpec.read(module)
        if self._variant is not None:
            self._variant.check_spec(self._spec, name)
        own = [leaf for leaf, _ in module.named_parameters() if leaf.partition(".")[0] not in _MOVED]
        if own:
            raise SwapError(
                f"{name}.{own[0]} is a parameter of {type(module).__name__} alone, with no place in what it would "
                "become: the function would change"
            )

    def carry_out(self, undo: list[Callable[[], None]]) -> None:
        """Build the new module, move the projections into it, and put it in place; add the way back to `undo`."""
        if self.is_idle:
            return
        if not self._name:
            raise SwapError(f"the model itself is {type(self._module).__name__}: there is no place to put another in")
        new = self._base if self._variant is None else self._build()
        moved = {leaf: getattr(self._module, leaf) for leaf in _MOVED if hasattr(self._module, leaf)}
        undo.append(lambda: self._place(self._module, moved))
        self._place(new, moved)
        if self._base is not new:
            for leaf in ("qkv", "proj"):
                setattr(self._base, leaf, None)
        new.train(self._module.training)

    def _build(self) -> nn.Module:
        assert self._variant is not None
        first = next(self._module.parameters())
        try:
            new = self._variant.from_spec(self._spec).to(device=first.device, dtype=first.dtype)
        except Exception as error:  # the variant may be a user's, and fail in any way
            reason = f"{type(error).__name__}: {error}"
            raise SwapError(f"{self._name}: {self._variant.__name__} cannot be built: {reason}") from error
        vars(new)[_ORIGIN] = Origin(self._base)
        return new

    def _place(self, module: nn.Module, moved: dict[str, nn.Module]) -> None:
        for leaf, child in moved.items():
            setattr(module, leaf, child)
        self._model.set_submodule(self._name, module)
