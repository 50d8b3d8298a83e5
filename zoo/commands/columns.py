"""Text that fits a terminal: columns, names in few words, one line."""

import re
import textwrap
from collections.abc import Collection, Iterable, Sequence

_GAP = "  "
_NARROW = 30  # a last column with less room than this, or than its longest word, goes below its row


def format_columns(
    rows: Sequence[Sequence[str]], *, right: Collection[int] = (), width: int | None = None
) -> list[str]:
    """Lay rows out in aligned columns.

    Args:
        rows: The cells, as many in each row; a row for the headings is one like the others.
        right: Indices of the columns that are aligned to the right.
        width: Characters to a line: the last column is wrapped to fit. None leaves every row one line.

    Returns:
        The lines, without spaces at their ends.
    """
    lines: list[str] = []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    room = None if width is None else width - sum(widths[:-1]) - len(_GAP) * (len(widths) - 1)
    for *cells, last in rows:
        padded = [
            cell.rjust(size) if index in right else cell.ljust(size)
            for index, (cell, size) in enumerate(zip(cells, widths, strict=False))
        ]
        head = _GAP.join([*padded, ""])
        if room is None or len(last) <= room:
            lines.append(f"{head}{last}".rstrip())
        elif width is not None and room < max(_NARROW, *map(len, last.split())):
            lines += [head.rstrip(), *_wrap(last, " " * 4, width)]
        else:
            below = _wrap(last, " " * len(head), len(head) + room)
            lines += [head + below[0].lstrip(), *below[1:]]
    return lines


def one_line(text: str) -> str:
    """Return a message without line breaks."""
    return re.sub(r"\s*[\r\n]\s*", " ", text.strip())


def join_names(names: Iterable[str]) -> str:
    """Write names in few words: "blocks.0-11.attn" where one index runs through, as freeze patterns are written."""
    indices: dict[tuple[str, str], list[int]] = {}
    for name in names:
        before, index, after = _split_index(name)
        indices.setdefault((before, after), []).extend([] if index is None else [index])
    said = []
    for (before, after), found in indices.items():
        runs = [f"{first}" if first == last else f"{first}-{last}" for first, last in _find_runs(found)]
        said += [f"{before}{run}{after}" for run in runs or [""]]
    return ", ".join(said)


def _wrap(text: str, indent: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        max(width, len(indent) + 10),
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _split_index(name: str) -> tuple[str, int | None, str]:
    """Split "layers.0.blocks.1.attn" at its last index; a name without one is all before it."""
    found = re.fullmatch(r"(.*?)(?<![^.])(\d+)((?:\.[^.]*[^.\d][^.]*)*)", name)
    return (name, None, "") if found is None else (found[1], int(found[2]), found[3])


def _find_runs(indices: list[int]) -> list[tuple[int, int]]:
    """Return first and last of each run of consecutive numbers."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], index)
        else:
            runs.append((index, index))
    return runs
