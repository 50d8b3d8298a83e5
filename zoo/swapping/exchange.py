"""Replace one projection by another of the same function."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from zoo.errors import SwapError
from zoo.projections import KINDS, Projection, ProjectionSpec, fill_parts, part_parameter, part_tensors
from zoo.slots import Place
from zoo.swapping.undo import Remains, Undo

Source = tuple[int, str]


class Exchange:
    """A planned replacement of what stands at a place by a variant's form of it.

    Making one changes nothing: the variant is built on the meta device, so that what it cannot carry is known before
    any projection of the model is touched.

    Attributes:
        place: Where.
        old: What stands there.
        is_kept: Whether the variant's form stands there already, so that nothing has to be done.

    Raises:
        SwapError: If the variant is no projection, or would join parts that differ in requires_grad.
    """

    def __init__(self, place: Place, variant: type[Projection]) -> None:
        self.place, self.variant, self.layout = place, variant, place.layout
        self.old = place.child
        first = next(self.old.parameters())
        has_bias = part_parameter(self.old, self.layout.parts[0], "bias") is not None
        in_features = self.old.in_features
        assert isinstance(in_features, int)
        self.spec = ProjectionSpec(in_features, self.layout, has_bias, first.device, first.dtype)
        twin = self._ask_variant(torch.device("meta"))
        self.is_kept = _form(twin) == _form(self.old)
        self.groups = tuple(_group_parts(twin, self.layout.parts))
        for kind, parts in self.groups:
            self._find_flag(kind, parts)

    def sources(self, kind: str, parts: Iterable[str]) -> tuple[Source | None, ...]:
        """Return what holds each of these parts now: a Parameter's id, and which part of it where it holds several."""
        is_fused = len(self.layout.parts) > 1 and not isinstance(self.old, Projection)
        stored = {part: part_parameter(self.old, part, kind) for part in parts}
        return tuple(
            None if tensor is None else (id(tensor), part if is_fused else "") for part, tensor in stored.items()
        )

    def carry_out(self, new: nn.Module, graves: dict[int, Remains], *, keep: bool) -> Callable[[], None]:
        """Put `new` in place and return the way back; the old module is let go of unless `keep`."""
        old, place = self.old, self.place
        undo = (lambda: place.put(old)) if keep else Undo(place, graves).run
        self.place.put(new)
        self.old = new
        return undo

    def build(self) -> nn.Module:
        """Return the variant's module, of the old one's values, dtype, device, requires_grad and mode.

        Raises:
            SwapError: If the variant does not keep a value that it was given.
        """
        new = self._ask_variant(self.spec.device)
        for kind in KINDS:
            values = part_tensors(self.old, self.layout, kind)
            self._fill(new, kind, values)
        for kind, parts in self.groups:
            target = part_parameter(new, parts[0], kind)
            if target is not None:
                target.requires_grad_(self._find_flag(kind, parts))
        return new.train(self.old.training)

    def _ask_variant(self, device: torch.device | None) -> nn.Module:
        try:
            return self.variant.build(replace(self.spec, device=device))
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # the variant may be a user's, and fail in any way
            reason = f"{type(error).__name__}: {error}"
            raise SwapError(f"{self.place.name}: {self.variant.__name__} cannot be built: {reason}") from error

    @torch.no_grad()
    def _fill(self, new: nn.Module, kind: str, values: dict[str, Tensor]) -> None:
        shapes = {part: tensor.shape for part, tensor in part_tensors(new, self.layout, kind).items()}
        if shapes == {part: tensor.shape for part, tensor in values.items()}:
            fill_parts(new, self.layout, kind, values)
        kept = part_tensors(new, self.layout, kind)
        for part in self.layout.parts:
            if not _equal(values.get(part), kept.get(part)):  # a variant of a user's may keep less
                raise SwapError(f"{self.place.name}: {self.variant.__name__} does not keep {part}'s {kind}")

    def _find_flag(self, kind: str, parts: tuple[str, ...]) -> bool:
        """Return requires_grad of parts that one tensor will hold; one tensor cannot be half frozen."""
        flags = {part: part_parameter(self.old, part, kind) for part in parts}
        first = flags[parts[0]]
        for part, tensor in flags.items():
            if tensor is not None and first is not None and tensor.requires_grad != first.requires_grad:
                raise SwapError(
                    f"{self.place.name}: {parts[0]} and {part} differ in requires_grad and share one {kind} after "
                    "the swap; freeze both or none"
                )
        return first is not None and first.requires_grad


def _form(module: nn.Module) -> tuple[object, ...]:
    """Return what makes two projections the same to the last detail but their values."""
    shapes = [(name, tensor.shape) for name, tensor in module.named_parameters()]
    return type(module), module.layout if isinstance(module, Projection) else None, tuple(shapes)


def _group_parts(twin: nn.Module, parts: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield kind and parts of each Parameter that a variant's form has."""
    for kind in KINDS:
        groups: dict[int, list[str]] = {}
        for part in parts:
            groups.setdefault(id(part_parameter(twin, part, kind)), []).append(part)
        yield from ((kind, tuple(group)) for group in groups.values())


def _equal(source: Tensor | None, target: Tensor | None) -> bool:
    """Say whether two tensors hold the same numbers, NaN for NaN; on the meta device shapes must do."""
    if source is None or target is None:
        return source is target
    if source.shape != target.shape:
        return False
    return source.is_meta or torch.allclose(source, target, rtol=0, atol=0, equal_nan=True)
