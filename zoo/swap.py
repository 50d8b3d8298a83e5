"""Replace the projections of a model's attention, in place and exactly, and put timm's own back."""

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import nn

from zoo.errors import SwapError, UnknownNameError
from zoo.init import check_scheme, init_model
from zoo.registry import find_attention
from zoo.slots import find_places, iter_attentions, iter_unmapped, outside_biases, why_not
from zoo.swapping.exchange import Exchange
from zoo.swapping.refusals import check_plain, check_unwrapped
from zoo.swapping.shared import SharedParts
from zoo.swapping.undo import Remains
from zoo.swapping.whole import Transplant, is_whole, projection_of

logger = logging.getLogger(__name__)
_LIST = "see python -m zoo list"


@dataclass(frozen=True)
class SwapReport:
    """What a swap did.

    Attributes:
        attention: The variant that now stands there; "timm" after a restore.
        modules: Names of the attention modules that are of that variant now, in the model's order.
        left: Names of the attention modules left as they were, because `names` did not choose them.
        init: The scheme that drew the projections, or None where the weights were carried over.
        is_whole: Whether the variant is a whole module, which may compute what it likes: the weights are the model's,
            the function is the variant's own.
        gradients_dropped: How many of the replaced parameters held a gradient, which their successors do not.
    """

    attention: str
    modules: tuple[str, ...]
    left: tuple[str, ...] = ()
    init: str | None = None
    is_whole: bool = False
    gradients_dropped: int = 0

    def __str__(self) -> str:
        said = [f"{len(self.modules)} attention modules -> {self.attention}"]
        said += [f"{len(self.left)} left"] if self.left else []
        said += [f"drawn by {self.init}" if self.init else "weights carried over"]
        said += ["the function is now the variant's own"] if self.is_whole else []
        said += [f"{self.gradients_dropped} gradients dropped"] if self.gradients_dropped else []
        return ", ".join(said)


def swap_attention(
    model: nn.Module,
    attention: str,
    *,
    init: str | None = None,
    seed: int | None = None,
    names: str | Collection[str] | None = None,
) -> SwapReport:
    """Replace the projections of every attention in `model` by a registered variant: in place, all or nothing.

    The function stays the same: weights, biases, ties, dtype, device, requires_grad and train mode are carried over;
    gradients are not. An optimizer made before the swap holds the old parameters: make it afterwards. One projection is
    replaced at a time and the old one freed, so that memory holds the model and little more; with `init`, which leaves
    no way back but the old weights, they stay until all are drawn.

    Args:
        model: A timm model, or any module that holds attention of a class known to `zoo.timm_map`.
        attention: A registered variant: "linear", "separate", "parameter" or your own. One that is a whole module
            (`zoo.Attention`) replaces the attention module itself, and starts where its own `__init__` says.
        init: A scheme that draws the projections anew (`zoo.init`), or None to carry the weights over.
        seed: Of the scheme's draw; None draws from torch's global stream.
        names: Attention modules to swap, as names or globs of theirs or of what holds them ("blocks.0.attn",
            "blocks.1?", "stages.0"); None swaps all.

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
    with _nothing_changed():
        exchanges = _plan(chosen, variant)
        transplants = [Transplant(model, name, module, variant) for name, module in chosen]
        with _undone_on_error() as undo:
            dropped = _exchange(model, exchanges, undo, keep=init is not None)
            for transplant in transplants:
                transplant.carry_out(undo)
            if init is not None:
                undo.append(_keep_outside(chosen))
                init_model(model, init, seed)
    whole = any(not transplant.is_idle for transplant in transplants) and is_whole(variant)
    report = SwapReport(attention, tuple(name for name, _ in chosen), left, init, whole, dropped)
    logger.debug("%s", report)
    return report


def restore_attention(model: nn.Module) -> SwapReport:
    """Put timm's own nn.Linear back in every attention, in place: the state_dict then loads strictly into stock timm.

    Attention of a class that no swap can have touched stays as it is.

    Raises:
        SwapError: If the parts of a fused weight differ in requires_grad or in their ties, since one tensor cannot be
            half frozen or half tied; or if a whole-module variant has parameters of its own, which timm has no place
            for. The message names it, and nothing was changed.
    """
    report = swap_attention(model, "linear", names="*")
    return replace(report, attention="timm", left=())


def _choose(model: nn.Module, names: Collection[str] | None) -> tuple[list[tuple[str, nn.Module]], tuple[str, ...]]:
    """Return the attention modules to swap and the names of those to leave, or refuse the model."""
    check_unwrapped(model)
    known = dict(iter_attentions(model))
    unmapped = list(iter_unmapped(model))
    if unmapped and names is None:
        name, module = unmapped[0]
        more = f" (and {len(unmapped) - 1} more)" if len(unmapped) > 1 else ""
        raise SwapError(
            f"{name or 'the model'}: cannot swap {type(module).__name__}, {why_not(module)}{more}; {_LIST}; "
            "nothing was changed"
        )
    if not known:
        raise SwapError(f"{type(model).__name__} has no attention that can be swapped; {_LIST}")
    if names is None:
        return list(known.items()), ()
    hits = {pattern: [name for name in known if _matches(name, pattern)] for pattern in names}
    for pattern, found in hits.items():
        if not found:
            raise UnknownNameError("attention module", pattern, known)
    chosen = [(name, module) for name, module in known.items() if any(name in found for found in hits.values())]
    if not chosen:
        raise SwapError("names is empty: give None to swap every attention, or the names of some")
    return chosen, tuple(name for name in known if name not in dict(chosen))


def _matches(name: str, pattern: str) -> bool:
    """Say whether a pattern names an attention module, or what holds it."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def _plan(chosen: list[tuple[str, nn.Module]], variant: type[nn.Module]) -> list[Exchange]:
    """Return what to replace; raise SwapError, by name, for what a swap would lose."""
    projection = projection_of(variant)
    exchanges = []
    for name, attention in chosen:
        for place in find_places(attention, name):
            check_plain(place.name, place.child, place.slot.parts)
            exchanges.append(Exchange(place, projection))
    return exchanges


def _exchange(model: nn.Module, exchanges: list[Exchange], undo: list[Callable[[], None]], *, keep: bool) -> int:
    """Carry the exchanges out, one at a time; `keep` holds on to the old weights, and renews all.

    Returns:
        How many of the old parameters held a gradient.
    """
    due = [exchange for exchange in exchanges if keep or not exchange.is_kept]
    dropped = {id(tensor) for exchange in due for tensor in exchange.old.parameters() if tensor.grad is not None}
    shared = SharedParts(model, due)
    graves: dict[int, Remains] = {}
    for exchange in due:
        new = exchange.build()
        shared.tie(exchange, new)
        undo.append(exchange.carry_out(new, graves, keep=keep))
    return len(dropped)


def _keep_outside(chosen: list[tuple[str, nn.Module]]) -> Callable[[], None]:
    """Copy the biases that a scheme draws outside of projections, and return what puts them back."""
    kept = [(bias, bias.detach().clone()) for _, module in chosen for bias in outside_biases(module).values()]

    def put_back() -> None:
        with torch.no_grad():
            for bias, values in kept:
                bias.copy_(values)

    return put_back


@contextmanager
def _undone_on_error() -> Iterator[list[Callable[[], None]]]:
    """Collect ways back, and on an error go all of them, the latest first."""
    undo: list[Callable[[], None]] = []
    try:
        yield undo
    except BaseException:
        for step in reversed(undo):
            step()
        raise


@contextmanager
def _nothing_changed() -> Iterator[None]:
    """Say in every refusal that the model is as it was."""
    try:
        yield
    except SwapError as error:
        raise SwapError(f"{error}; nothing was changed") from error
