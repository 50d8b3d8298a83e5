"""A model's attention for people: a line for each block, what is stored, and what stands out last."""

import math
from collections.abc import Iterable, Sequence

from zoo.auditing.scale import TOKENS
from zoo.backbones import short_name
from zoo.commands.columns import format_columns, join_names
from zoo.commands.description import DescribedAttention, Description, Note, StoredParameter

_WHOLE = "(the model)"
_PARTS = ("q", "k", "v", "out")


def format_description(description: Description) -> str:
    """Return a table with "!" before the attention to look at, then what is stored, then the notes."""
    doubted = {note.attention for note in description.notes if note.kind == "doubt"}
    sections = [_format_table(description.attentions, doubted), *_format_stored(description.attentions)]
    if description.notes:
        sections.append(_format_notes(description.notes))
    return "\n\n".join("\n".join(section) for section in sections)


def _format_table(attentions: Sequence[DescribedAttention], doubted: set[str]) -> list[str]:
    titles = ("", "ATTENTION", "DIM", "HEADS", *(f"STD {part}" for part in _PARTS), "LOGIT STD", "ENTROPY")
    rows: list[tuple[str, ...]] = [titles]
    previous: tuple[str, ...] = ()
    for attention in attentions:
        expected = (
            *(_show(spread.expected_std if spread else None) for spread in map(attention.parts.get, _PARTS)),
            _show(attention.expected_logit_std),
        )
        if expected != previous and any(cell != "-" for cell in expected):
            rows.append(("", "by the scheme", "", "", *expected, f"max {math.log(TOKENS):.2f}"))
        previous = expected
        rows.append(
            (
                "!" if attention.name in doubted else "",
                attention.name or _WHOLE,
                str(attention.dim),
                str(attention.num_heads or "-"),
                *(_show(spread.std if spread else None) for spread in map(attention.parts.get, _PARTS)),
                _show(attention.logit_std),
                "-" if attention.entropy is None else f"{attention.entropy:.2f}",
            )
        )
    return format_columns(rows, right=range(2, 10))


def _format_stored(attentions: Iterable[DescribedAttention]) -> Iterable[list[str]]:
    """Show what is stored once for all attention modules that store alike."""
    alike: dict[tuple[object, ...], list[DescribedAttention]] = {}
    for attention in attentions:
        kinds = tuple(
            (p.name, p.shape, p.dtype, p.trainable, p.contiguous, bool(p.tied_to)) for p in attention.parameters
        )
        alike.setdefault((attention.cls, kinds), []).append(attention)
    for group in alike.values():
        names = join_names(attention.name or _WHOLE for attention in group)
        rows = [
            (
                f"  {parameter.name}",
                " x ".join(map(str, parameter.shape)) or "scalar",
                ", ".join(parameter.parts) or "-",
                _say_state(parameter),
            )
            for parameter in group[0].parameters
        ]
        yield [f"{names}: {short_name(group[0].cls)} stores", *(format_columns(rows) if rows else ["  nothing"])]


def _say_state(parameter: StoredParameter) -> str:
    words = ["trainable" if parameter.trainable else "frozen"]
    words += [] if parameter.contiguous else ["not contiguous"]
    words += ["tied"] if parameter.tied_to else []
    return ", ".join(words)


def _format_notes(notes: Iterable[Note]) -> list[str]:
    """Tell alike notes of many attention modules as one."""
    alike: dict[tuple[str, ...], list[Note]] = {}
    for note in notes:
        alike.setdefault((note.kind, note.what, note.yardstick, _show(note.wanted)), []).append(note)
    lines = []
    for (kind, what, yardstick, wanted), group in sorted(alike.items(), key=lambda item: item[0][0] != "doubt"):
        names = join_names(note.attention or _WHOLE for note in group)
        got = sorted(note.got for note in group if note.got is not None)
        ends = list(dict.fromkeys(map(_show, got[:1] + got[-1:])))
        numbers = f" {' to '.join(ends)} where {yardstick} {wanted}" if got else ""
        lines.append(f"{'! ' if kind == 'doubt' else '  '}{names}: {what}{numbers}")
    return lines


def _show(number: float | None) -> str:
    return "-" if number is None else f"{number:#.3g}".rstrip(".")
