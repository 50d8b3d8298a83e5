"""What the audit says of one tensor, and of many that have the same fault."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]

_FEW, _LISTED = 4, 14  # so many alike are told in full; so many names and ranges of names follow a line that tells more
_NUMBER = re.compile(r"\([\d, ]*\)|-?\d+(\.\d+)?(e[+-]?\d+)?")  # or a shape
_INDEX = re.compile(r"(?:^|(?<=[. ]))(\d+)(?=\.|$)")  # a block's in a name, or a place in an optimizer's group


@dataclass(frozen=True)
class Finding:
    """One fault, doubt or remark.

    Attributes:
        check: Which check found it, as "optimizer".
        severity: "error" will not train as its owner believes; "warning" may not; "note" is as it should be but worth
            knowing.
        tensor: The parameter's, buffer's, attribute's or module's name in the bare model; "" for the whole model.
        message: What is wrong and the way out, without the name.
    """

    check: str
    severity: Severity
    tensor: str
    message: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.check}: {self.tensor and self.tensor + ': '}{self.message}"


def tell_findings(findings: Iterable[Finding]) -> Iterator[str]:
    """Yield a line for each finding, and one line for more than a few that differ in names and numbers alone.

    Such a line is the first one's, with the names of all behind it, as in "[37 alike: cls_token,
    blocks.0-11.norm1.weight, ...]".
    """
    alike: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        alike.setdefault((finding.severity, finding.check, _NUMBER.sub("", finding.message)), []).append(finding)
    for group in alike.values():
        if len(group) <= _FEW:
            yield from map(str, group)
            continue
        names = list(_join_indices(finding.tensor for finding in group))
        rest = [f"{len(names) - _LISTED} others"] if len(names) > _LISTED else []
        yield f"{group[0]} [{len(group)} alike: {', '.join(names[:_LISTED] + rest)}]"


def _join_indices(names: Iterable[str]) -> Iterator[str]:
    """Yield names in their order, those of following blocks as one, as "blocks.0-11.norm1.weight"."""
    indices: dict[tuple[str, ...], list[int]] = {}
    for name in names:
        before, *index_and_after = _INDEX.split(name, maxsplit=1)
        indices.setdefault((before, *index_and_after[1:]), []).extend(map(int, index_and_after[:1]))
    for (before, *after), found in indices.items():
        if not found:
            yield before
        firsts = [index for index in sorted(found) if index - 1 not in found]
        lasts = [index for index in sorted(found) if index + 1 not in found]
        for first, last in zip(firsts, lasts, strict=True):
            yield f"{before}{first}{f'-{last}' if last > first else ''}{''.join(after)}"
