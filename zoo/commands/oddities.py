"""What stands out among a model's attention: a wrong draw, the odd block, what is frozen, tied or strided."""

import math
from collections.abc import Collection, Iterator, Sequence
from statistics import median

from zoo.auditing.scale import EXPECTED_LOGIT_STD
from zoo.commands.description import DescribedAttention, Note, StoredParameter

_SCHEME = "the scheme gives"
_SLACK = 0.05  # part by which a spread may differ from its scheme's, beyond chance
_DEVIATIONS = 6  # of the spread of a finite draw: one in a billion
_LOGITS_SLACK = 0.25  # their spread is of a product of two draws
_AROUND = 7  # a block and the nearest six: two odd ones side by side do not outweigh the rest
_FEWEST = 3  # of two unlike blocks, either may be the odd one
_ODD = 2.5  # times its neighbours' spread: timm's scaling by depth changes by less from block to block


def find_notes(attentions: Sequence[DescribedAttention], extreme: Collection[str] | None) -> tuple[Note, ...]:
    """Return what stands out, in the order of the attention modules.

    Args:
        attentions: All of a model's.
        extreme: Names of those whose logits spread so far, or so little, that they can hardly learn; None if the
            weights are trained, and no draw to be judged.
    """
    odd = {} if extreme is None else _find_odd(attentions)
    notes: list[Note] = []
    for attention in attentions:
        notes += _check_finite(attention)
        if extreme is not None:
            notes += [*_check_draw(attention), *odd.get(attention.name, ())]
            notes += _check_logits(attention, is_extreme=attention.name in extreme)
        notes += _remark(attention)
    return tuple(notes)


def _check_finite(attention: DescribedAttention) -> Iterator[Note]:
    for parameter in attention.parameters:
        for part, spread in parameter.parts.items():
            if spread.std is None and spread.numbers:
                yield Note(attention.name, "doubt", f"{_name_part(parameter, part)} holds NaN or Inf")


def _check_draw(attention: DescribedAttention) -> Iterator[Note]:
    """Find parts whose spread is not what the declared scheme gives."""
    for parameter in attention.parameters:
        for part, spread in parameter.parts.items():
            if spread.std is None or spread.expected_std is None:
                continue
            chance = _DEVIATIONS / math.sqrt(2 * spread.numbers)
            if abs(spread.std - spread.expected_std) > (_SLACK + chance) * spread.expected_std:
                what = f"std of {_name_part(parameter, part)}"
                yield Note(attention.name, "doubt", what, spread.std, spread.expected_std, _SCHEME)


def _find_odd(attentions: Sequence[DescribedAttention]) -> dict[str, list[Note]]:
    """Find parts of no declared scheme whose spread is far from that of the same part in the blocks around."""
    found: dict[str, list[Note]] = {}
    rows: dict[tuple[str, str, tuple[int, ...]], list[tuple[str, float]]] = {}
    for attention in attentions:
        for parameter in attention.parameters:
            for part, spread in parameter.parts.items():
                if spread.std is not None and spread.expected_std is None and len(parameter.shape) > 1:
                    key = (part, _name_part(parameter, part), parameter.shape)
                    rows.setdefault(key, []).append((attention.name, spread.std))
    for (_, where, _), row in rows.items():
        for index, (name, std) in enumerate(row):
            start = max(0, min(index - _AROUND // 2, len(row) - _AROUND))
            around = row[start : start + _AROUND]
            usual = median(other for _, other in around)
            if len(around) < _FEWEST:
                continue
            if not usual / _ODD <= std <= usual * _ODD:
                note = Note(name, "doubt", f"std of {where}", std, usual, "the blocks around have")
                found.setdefault(name, []).append(note)
    return found


def _check_logits(attention: DescribedAttention, *, is_extreme: bool) -> Iterator[Note]:
    got, wanted = attention.logit_std, attention.expected_logit_std
    if got is None:
        return
    if is_extreme:
        what = "attends to one token" if got > EXPECTED_LOGIT_STD else "attends to all tokens alike"
        yield Note(attention.name, "doubt", f"{what}: logit std", got, EXPECTED_LOGIT_STD, "nn.Linear's draw gives")
    elif wanted is not None and abs(got - wanted) > _LOGITS_SLACK * wanted:
        yield Note(attention.name, "doubt", "logit std", got, wanted, _SCHEME)


def _remark(attention: DescribedAttention) -> Iterator[Note]:
    for parameter in attention.parameters:
        if not parameter.contiguous:
            yield Note(attention.name, "doubt", f"{parameter.name} is not contiguous")
        if not parameter.trainable:
            yield Note(attention.name, "remark", f"{parameter.name} is frozen")
        if parameter.tied_to:
            yield Note(attention.name, "remark", f"{parameter.name} is one tensor with {', '.join(parameter.tied_to)}")
    if attention.normalised:
        yield Note(attention.name, "remark", "q and k are normalised, which bounds the logits")


def _name_part(parameter: StoredParameter, part: str) -> str:
    """Return "qkv.to_k", or "k of qkv.weight" where a parameter holds several parts."""
    return parameter.name if len(parameter.parts) == 1 else f"{part} of {parameter.name}"
