"""Replace the projections of a model's attention, in place and exactly, and put timm's own back."""

import logging
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from zoo.errors import SwapError, UnknownNameError
from zoo.init import check_scheme, init_model, part_sizes
from zoo.projections import LinearProjection, Projection, part_biases, part_parameter, part_weights
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
    names: Collection[str] | None = None,
) -> SwapReport:
    """Replace the projections of every attention in `model` by a registered variant: in place, all or nothing.

    The function stays the same: weights, biases, dtype, device, requires_grad and train mode are carried over. An
    optimizer made before the swap holds the old parameters: make it afterwards.

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
    chosen, left = _choose(model, names)
    steps = [step for name, module in chosen for step in _plan(name, module)]
    _check_ties(model, steps)
    if init is not None:
        if left:
            raise SwapError(f"init={init!r} draws every attention of the model; give it without names")
        init_model(model, init, seed)
    _replace_all(steps, variant)
    report = SwapReport(attention, tuple(name for name, _ in chosen), left, init)
    logger.debug("%s", report)
    return report


def restore_attention(model: nn.Module) -> SwapReport:
    """Put timm's own nn.Linear back in every attention, in place: the state_dict then loads strictly into stock timm.

    Raises:
        SwapError: If the parts of a fused weight differ in requires_grad: one tensor cannot be half frozen.
    """
    report = swap_attention(model, "linear")
    return SwapReport("timm", report.modules)


def _choose(model: nn.Module, names: Collection[str] | None) -> tuple[list[tuple[str, nn.Module]], tuple[str, ...]]:
    """Return the attention modules to swap and the names of those to leave, or refuse the model."""
    if isinstance(model, nn.parallel.DistributedDataParallel) or hasattr(model, "_orig_mod"):
        raise SwapError(f"{type(model).__name__} is a wrapper: swap the model before it is wrapped or compiled")
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
        if type(child) is not nn.Linear and not isinstance(child, Projection):
            raise SwapError(f"{step.name}: cannot swap {type(child).__name__}, only nn.Linear; nothing was changed")
        if hooks := [
            kind for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks") if getattr(child, kind)
        ]:
            raise SwapError(
                f"{step.name}: has {hooks[0].strip('_').replace('_', ' ')} that a swap would lose; remove them first"
            )
        step.sizes = part_sizes(child, slot.parts)
        yield step


def _check_ties(model: nn.Module, steps: list[_Step]) -> None:
    """Refuse to break a tie: a parameter of a projection that also lives somewhere else in the model."""
    homes: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        homes[id(parameter)].append(name)
    for step in steps:
        for name, parameter in step.source().named_parameters():
            if len(homes[id(parameter)]) > 1:
                others = [home for home in homes[id(parameter)] if home != f"{step.name}.{name}"]
                raise SwapError(
                    f"{step.name}.{name} is tied to {', '.join(others)}: a swap would break that; nothing was changed"
                )


def _replace_all(steps: list[_Step], variant: type[nn.Module]) -> None:
    """Replace one projection at a time, so that only one is held twice; on an error put back what was replaced."""
    done: list[tuple[_Step, type[nn.Module]]] = []
    try:
        for step in steps:
            before = type(step.source()) if isinstance(step.source(), Projection) else LinearProjection
            setattr(step.owner, step.child, _convert(step, variant))
            done.append((step, before))
    except BaseException:
        for step, before in reversed(done):
            setattr(step.owner, step.child, _convert(step, before))
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
    for read in (part_weights, part_biases):
        sources, targets = read(old, sizes), read(new, sizes)
        for part in sizes:
            source, target = sources[part], targets[part]
            if source is not None and target is not None:
                target.copy_(source)
    _carry_flags(step, old, new)
    return new.train(old.training)


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
