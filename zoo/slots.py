"""Find the attention in a model, and in each the projections that its row of `zoo.timm_map` names."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor, nn

from zoo.errors import SwapError
from zoo.layout import Layout
from zoo.projections import Projection
from zoo.timm_map import ATTENTION_WORDS, NOT_IN_A_BLOCK, REFUSED, ROWS, AttentionRow, Slot

_OURS = "zoo.attention.Attention"
_EMPTY = (type(None), nn.Identity)  # where timm keeps no projection


@dataclass(frozen=True)
class Place:
    """One projection of an attention module.

    Attributes:
        attention: The module that holds it.
        name: Its full name in the model, as "blocks.0.attn.qkv".
        slot: The row's entry for it.
    """

    attention: nn.Module
    name: str
    slot: Slot

    @property
    def child(self) -> nn.Module:
        """What stands there now."""
        return self.attention.get_submodule(self.slot.child)

    @property
    def holds_matrix(self) -> bool:
        """Whether an nn.Linear or a projection stands there, not a convolution or what else timm may put."""
        return isinstance(self.child, nn.Linear | Projection)

    @property
    def layout(self) -> Layout:
        """The parts and widths of what stands there."""
        child = self.child
        return child.layout if isinstance(child, Projection) else _read_layout(self.attention, self.slot, self.name)

    def put(self, module: nn.Module) -> None:
        """Let `module` stand there."""
        owner, _, leaf = self.slot.child.rpartition(".")
        setattr(self.attention.get_submodule(owner), leaf, module)


def qualified_name(module: nn.Module) -> str:
    """Return the class's full name, as the rows are keyed."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def find_row(attention: nn.Module) -> AttentionRow | None:
    """Return the row of the module's class, or of the nearest class it derives from; None if there is none."""
    return next((ROWS[name] for name in _all_names(attention) if name in ROWS), None)


def find_places(attention: nn.Module, name: str = "") -> tuple[Place, ...]:
    """Return the projections that an attention module holds, in its row's order; its own `name` leads theirs.

    Raises:
        SwapError: If no child that the row gives for a part is there, not even empty: the class is not what it was.
    """
    row = find_row(attention)
    assert row is not None, f"{qualified_name(attention)} has no row"
    for part, children in row.children.items():
        if not any(_has(attention, child) for child in children):
            where = f"{name}: " if name else ""
            raise SwapError(
                f"{where}{type(attention).__name__} has no {' or '.join(children)} for {part}, as its row in "
                "zoo.timm_map says; this timm may have changed the class"
            )
    return tuple(
        Place(attention, f"{name}.{slot.child}".lstrip("."), slot) for slot in row.slots if _is_present(attention, slot)
    )


def outside_biases(attention: nn.Module) -> dict[str, Tensor]:
    """Return the biases that the module keeps outside of its projections, by part; a buffer among them is constant."""
    row = find_row(attention)
    assert row is not None, f"{qualified_name(attention)} has no row"
    biases = {part: getattr(attention, where, None) for part, where in row.biases}
    return {part: bias for part, bias in biases.items() if bias is not None}


def iter_attentions(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of every attention that has a row, in the model's order."""
    for name, module in model.named_modules():
        if _is_mapped(module):
            yield name, module


def iter_claims(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of whatever is or claims to be attention, but for parts of one that has a row.

    A block that is called after the attention that it holds is none.
    """
    claims = [
        (name, module) for name, module in model.named_modules() if _is_mapped(module) or looks_like_attention(module)
    ]
    mapped = tuple(f"{name}." if name else "" for name, module in claims if _is_mapped(module))
    for name, module in claims:
        prefix = f"{name}." if name else ""
        holds_another = any(other != name and other.startswith(prefix) for other, _ in claims)
        if _is_mapped(module) or not (holds_another or name.startswith(mapped)):
            yield name, module


def iter_unmapped(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of whatever claims attention, has no row, and neither holds nor is part of one that has."""
    yield from ((name, module) for name, module in iter_claims(model) if not _is_mapped(module))


def looks_like_attention(module: nn.Module) -> bool:
    """Say whether a class is, or claims by its name or a base's to be, attention in a block."""
    names = _all_names(module)
    if any(name in NOT_IN_A_BLOCK for name in names):
        return False
    return any(name in REFUSED for name in names) or _claim_attention(names)


def why_not(attention: nn.Module) -> str:
    """Return why an attention without a row cannot be swapped."""
    names = (name for name in _all_names(attention) if name in REFUSED)
    return next((REFUSED[name] for name in names), "no row in zoo.timm_map")


def _is_mapped(module: nn.Module) -> bool:
    """Say whether a module's own class has a row, or derives from ours: one of timm's may be derived in other ways."""
    return qualified_name(module) in ROWS or _OURS in _all_names(module)


def _all_names(module: nn.Module) -> tuple[str, ...]:
    """Return the full names of a module's class and of all its bases, the nearest first."""
    return _names_of(type(module))  # type: ignore[arg-type]  # mypy takes a class for unhashable


@lru_cache(maxsize=4096)
def _names_of(cls: type) -> tuple[str, ...]:
    return tuple(f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__)


@lru_cache(maxsize=4096)
def _claim_attention(names: tuple[str, ...]) -> bool:
    last = [name.rpartition(".")[2].lower() for name in names]
    return any(word in name for name in last for word in ATTENTION_WORDS)


def _has(attention: nn.Module, child: str) -> bool:
    """Say whether a child is there or None; below a child that is None nothing is missed."""
    module: object = attention
    for leaf in child.split("."):
        if module is None or isinstance(module, nn.Identity):
            return True
        if not hasattr(module, leaf):
            return False
        module = getattr(module, leaf)
    return True


def _is_present(attention: nn.Module, slot: Slot) -> bool:
    if slot.only_if is not None and getattr(attention, slot.only_if[0]) != slot.only_if[1]:
        return False
    module: object = attention
    for leaf in slot.child.split("."):
        module = getattr(module, leaf, None)
    return not isinstance(module, _EMPTY)


def _read_layout(attention: nn.Module, slot: Slot, name: str) -> Layout:
    """Read the parts' widths off an attention module; SwapError where they do not fit what stands there."""
    total = attention.get_submodule(slot.child).out_features
    assert isinstance(total, int)
    proportions: list[int] = []
    for attribute in slot.widths:
        value = getattr(attention, attribute)
        proportions += [value] if isinstance(value, int) else list(value)
    proportions = proportions or [1] * len(slot.parts)
    by_head = getattr(attention, slot.by_head) if isinstance(slot.by_head, str) else slot.by_head
    num_heads = attention.num_heads if by_head else 1
    assert isinstance(num_heads, int)
    if total % (sum(proportions) * num_heads) or len(proportions) != len(slot.parts):
        raise SwapError(f"{name}: {total} columns do not hold {', '.join(slot.parts)} of widths {proportions}")
    unit = total // sum(proportions)
    return Layout({part: unit * width for part, width in zip(slot.parts, proportions, strict=True)}, num_heads)
