"""Replace the projections of a model's attention, in place and exactly, and put timm's own back."""

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from zoo.errors import SwapError, UnknownNameError
from zoo.init import check_scheme, init_model, part_sizes
from zoo.projections import Projection, part_biases, part_parameter, part_weights
from zoo.refusals import check_plain, check_ties, check_unwrapped
from zoo.registry import find_attention
from zoo.timm_map import iter_attentions, iter_unmapped, present_slots

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SwapReport:
    """What a swap did.

    Attributes:
        attention: The variant that now stands there; "timm" after a restore.
        modules: Names of the attention modules whose projections were replaced, in the model's order.
        left: Names of the attention modules left as they were, because `names` did not choose them.
        init: The scheme that drew the projections, or None where the weights were carried over.
    """

    attention: str
    modules: tuple[str, ...]
    left: tuple[str, ...] = ()
    init: str | None = None

    def __str__(self) -> str:
        how = f"drawn by {self.init}" if self.init else "weights carried over"
        kept = f", {len(self.left)} left" if self.left else ""
        return f"{len(self.modules)} attention modules -> {self.attention}{kept}, {how}"


@dataclass
class _Step:
    """One projection to replace: `owner.child`, holding parts of these widths."""

    owner: nn.Module
    owner_name: str
    child: str
    sizes: dict[str, int]

    @property
    def name(self) -> str:
        return f"{self.owner_name}.{self.child}" if self.owner_name else self.child

    def source(self) -> nn.Module:
        return self.owner.get_submodule(self.child)


def swap_attention(
    model: nn.Module,
    attention: str,
    *,
    init: str | None = None,
    seed: int | None = None,
    names: str | Collection[str] | None = None,
) -> SwapReport:
    """Replace the projections of every attention in `model` by a registered variant: in place, all or nothing.

    The function stays the same: weights, biases, dtype, device, requires_grad and train mode are carried over;
    gradients are not. An optimizer made before the swap holds the old parameters: make it afterwards. Until it is
    done, old and new projections are held side by side, about a third more than the weights of a ViT.

    Args:
        model: A timm model, or any module that holds attention of a class known to `zoo.timm_map`.
        attention: A registered variant: "linear", "separate", "parameter" or your own.
        init: A scheme that draws the projections anew (`zoo.init`), or None to carry the weights over.
        seed: Of the scheme's draw; None draws from torch's global stream.
        names: Attention modules to swap, as names or globs ("blocks.0.attn", "blocks.1?.attn"); None swaps all.

    Returns:
        Which modules were swapped.

    Raises:
        UnknownNameError: If there is no such variant, scheme or attention module.
        SwapError: If some attention in the model cannot be swapped; the message names it, and nothing was changed.
    """
    variant = find_attention(attention)
    if init is not None:
        check_scheme(init)
    chosen, left = _choose(model, [names] if isinstance(names, str) else names)
    if init is not None and left:
        raise SwapError(f"init={init!r} draws every attention of the model; give it without names")
    steps = [step for name, module in chosen for step in _plan(name, module)]
    check_ties(model, [(step.name, step.source()) for step in steps])
    fresh = [_convert(step, variant) for step in steps]  # all are made before one is placed
    with _placed(steps, fresh):
        if init is not None:
            init_model(model, init, seed)
    report = SwapReport(attention, tuple(name for name, _ in chosen), left, init)
    logger.debug("%s", report)
    return report


def restore_attention(model: nn.Module) -> SwapReport:
    """Put timm's own nn.Linear back in every attention, in place: the state_dict then loads strictly into stock timm.

    Attention of a class that no swap can have touched stays as it is.

    Raises:
        SwapError: If the parts of a fused weight differ in requires_grad: one tensor cannot be half frozen.
    """
    report = swap_attention(model, "linear", names="*")
    return SwapReport("timm", report.modules)


def _choose(model: nn.Module, names: Collection[str] | None) -> tuple[list[tuple[str, nn.Module]], tuple[str, ...]]:
    """Return the attention modules to swap and the names of those to leave, or refuse the model."""
    check_unwrapped(model)
    known = dict(iter_attentions(model))
    unmapped = list(iter_unmapped(model))
    if unmapped and names is None:
        name, module = unmapped[0]
        more = f" (and {len(unmapped) - 1} more)" if len(unmapped) > 1 else ""
        raise SwapError(
            f"{name}: cannot swap {type(module).__name__}, no row in zoo.timm_map{more}; nothing was changed"
        )
    if not known:
        raise SwapError(
            f"{type(model).__name__} has no attention that can be swapped: see zoo.timm_map for the classes known"
        )
    if names is None:
        return list(known.items()), ()
    for pattern in names:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise UnknownNameError("attention module", pattern, known)
    chosen = [(name, module) for name, module in known.items() if any(fnmatchcase(name, p) for p in names)]
    return chosen, tuple(name for name in known if name not in dict(chosen))


def _plan(name: str, attention: nn.Module) -> Iterator[_Step]:
    """Yield what to replace in one attention module; raise SwapError for what a swap would lose."""
    for slot in present_slots(attention):
        child = attention.get_submodule(slot.child)
        step = _Step(attention, name, slot.child, {})
        check_plain(step.name, child, slot.parts)
        step.sizes = part_sizes(child, slot.parts)
        yield step


@contextmanager
def _placed(steps: list[_Step], fresh: list[nn.Module]) -> Iterator[None]:
    """Put the fresh projections in place; on an error put the old ones back, the very same modules."""
    old = [step.source() for step in steps]
    try:
        for step, module in zip(steps, fresh, strict=True):
            setattr(step.owner, step.child, module)
        yield
    except BaseException:
        for step, module in zip(steps, old, strict=True):
            setattr(step.owner, step.child, module)
        raise


@torch.no_grad()
def _convert(step: _Step, variant: type[nn.Module]) -> nn.Module:
    """Build the variant's module and copy weights, biases and flags into it."""
    if not issubclass(variant, Projection):
        raise SwapError(
            f"{variant.__name__} is no zoo.projections.Projection, the only kind of variant that a swap can place"
        )
    old, sizes = step.source(), step.sizes
    first = next(old.parameters())
    has_bias = part_parameter(old, next(iter(sizes)), "bias") is not None
    in_features = old.in_features
    assert isinstance(in_features, int)
    new = variant.build(in_features, sizes, bias=has_bias, device=first.device, dtype=first.dtype)
    for kind, read in (("weight", part_weights), ("bias", part_biases)):
        sources, targets = read(old, sizes), read(new, sizes)
        for part in sizes:
            source, target = sources[part], targets[part]
            if source is None and target is None:
                continue
            if source is not None and target is not None and source.shape == target.shape:
                target.copy_(source)
            if not _equal(source, read(new, sizes)[part]):  # a variant of a user's may keep less
                raise SwapError(f"{step.name}: {variant.__name__} does not keep {part}'s {kind}; nothing was changed")
    _carry_flags(step, old, new)
    return new.train(old.training)


def _equal(source: Tensor | None, target: Tensor | None) -> bool:
    """Say whether two tensors hold the same numbers, NaN for NaN; on the meta device shapes must do."""
    if source is None or target is None or source.shape != target.shape:
        return False
    return source.is_meta or torch.allclose(source, target, rtol=0, atol=0, equal_nan=True)


def _carry_flags(step: _Step, old: nn.Module, new: nn.Module) -> None:
    """Carry requires_grad from part to part; one fused tensor cannot be half frozen."""
    for kind in ("weight", "bias"):
        flags: dict[int, tuple[bool, str]] = {}
        for part in step.sizes:
            source, target = part_parameter(old, part, kind), part_parameter(new, part, kind)
            if source is None or target is None:
                continue
            flag, first = flags.setdefault(id(target), (source.requires_grad, part))
            if flag != source.requires_grad:
                raise SwapError(
                    f"{step.name}: {first} and {part} differ in requires_grad and share one {kind} after the swap"
                )
            target.requires_grad_(source.requires_grad)
