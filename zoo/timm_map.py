"""Which children of which timm attention class are projections: a class that timm adds needs a row here, nothing else.

Each row was checked against timm 1.0.31 by comparing logits and gradients bit for bit. A class without a row is
refused: that its children look right does not make a swap right.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Slot:
    """A child of an attention module that holds the projections of these parts, side by side."""

    child: str
    parts: tuple[str, ...]


@dataclass(frozen=True)
class AttentionRow:
    """The slots of an attention class (those present on a module count) and where it keeps biases outside of them."""

    slots: tuple[Slot, ...]
    biases: tuple[tuple[str, str], ...] = ()  # (part, attribute of the attention module)


_QKV = Slot("qkv", ("q", "k", "v"))
_APART = (Slot("q_proj", ("q",)), Slot("k_proj", ("k",)), Slot("v_proj", ("v",)))
_OUT = Slot("proj", ("out",))

ROWS: dict[str, AttentionRow] = {
    "zoo.attention.Attention": AttentionRow((_QKV, _OUT)),
    "timm.layers.attention.Attention": AttentionRow((_QKV, _OUT)),
    "timm.layers.attention.AttentionRope": AttentionRow((_QKV, *_APART, _OUT)),
    # q_bias and v_bias are timm's parameters, k_bias its zero buffer: they stay on the module
    "timm.models.eva.EvaAttention": AttentionRow(
        (_QKV, *_APART, _OUT), biases=(("q", "q_bias"), ("k", "k_bias"), ("v", "v_bias"))
    ),
}

# Heads that pool tokens by attention, and attention over channels: no block's token self-attention, so they stay as
# they are.
NOT_IN_A_BLOCK = ("AttentionPool", "AttentionPoolLatent", "AttentionPoolPrr", "AttentionPool2d", "RotAttentionPool2d")
_ATTENTION_WORDS = ("attention", "attn", "shma", "litemla", "parallelscalingblock")


def qualified_name(module: nn.Module) -> str:
    """Return the class's full name, as the rows are keyed."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def find_row(attention: nn.Module) -> AttentionRow | None:
    """Return the row of the module's class, or of the nearest class it derives from; None if there is none."""
    names = (f"{cls.__module__}.{cls.__qualname__}" for cls in type(attention).__mro__)
    return next((ROWS[name] for name in names if name in ROWS), None)


def looks_like_attention(module: nn.Module) -> bool:
    """Say whether a class claims, by its name or a base's, to be attention in a block: without a row it is refused."""
    names = [cls.__name__ for cls in type(module).__mro__]
    if any(name in NOT_IN_A_BLOCK for name in names):
        return False
    return any(word in name.lower() for name in names for word in _ATTENTION_WORDS)


def present_slots(attention: nn.Module) -> tuple[Slot, ...]:
    """Return the slots of its row that this attention module fills: None and nn.Identity hold no projection."""
    row = find_row(attention)
    assert row is not None, f"{qualified_name(attention)} has no row"
    empty = (type(None), nn.Identity)
    return tuple(slot for slot in row.slots if not isinstance(getattr(attention, slot.child, None), empty))


def outside_biases(attention: nn.Module) -> dict[str, Tensor]:
    """Return the biases that the module keeps outside of its projections, by part; a buffer among them is constant."""
    row = find_row(attention)
    assert row is not None, f"{qualified_name(attention)} has no row"
    biases = {part: getattr(attention, where, None) for part, where in row.biases}
    return {part: bias for part, bias in biases.items() if bias is not None}


def iter_attentions(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of every attention that has a row, in the model's order."""
    for name, module in model.named_modules():
        if qualified_name(module) in ROWS:
            yield name, module


def iter_unmapped(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of whatever claims attention, has no row, and is no part of an attention that has one."""
    mapped = tuple(name for name, _ in iter_attentions(model))
    for name, module in model.named_modules():
        inside = any(name == outer or name.startswith(f"{outer}.") for outer in mapped)
        if not inside and looks_like_attention(module):
            yield name, module
