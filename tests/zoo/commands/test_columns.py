import pytest

from zoo.commands.columns import format_columns, join_names, one_line

ROWS = [("NAME", "SIZE", "WHAT"), ("a", "5", "one"), ("longer", "12", "")]


def test_columns_are_aligned_and_end_without_spaces() -> None:
    assert format_columns(ROWS, right={1}) == ["NAME    SIZE  WHAT", "a          5  one", "longer    12"]


def test_a_last_column_that_does_not_fit_is_wrapped_below_itself() -> None:
    lines = format_columns([("a", "words " * 10), ("bb", "few")], width=36)
    assert lines[0] == "a   words words words words words"
    assert lines[1] == "    words words words words words"
    assert lines[-1] == "bb  few"
    assert all(len(line) <= 36 for line in lines)


def test_a_last_column_without_room_goes_below_its_row_and_loses_nothing() -> None:
    lines = format_columns([("a" * 30, "words " * 10)], width=40)
    assert lines[0] == "a" * 30
    assert all(line.startswith("    words") and len(line) <= 40 for line in lines[1:])
    assert " ".join(lines).count("words") == 10


def test_without_a_width_a_row_is_one_line_however_long() -> None:
    assert format_columns([("a", "words " * 50)]) == [f"a  {'words ' * 50}".rstrip()]


def test_no_word_is_broken() -> None:
    assert format_columns([("a", "w" * 50)], width=20)[-1].strip() == "w" * 50


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([f"blocks.{i}.attn" for i in range(12)], "blocks.0-11.attn"),
        (["blocks.0.attn", "blocks.2.attn", "blocks.3.attn"], "blocks.0.attn, blocks.2-3.attn"),
        ([f"s.{j}.blocks.{i}.attn" for j in (0, 1) for i in (0, 1)], "s.0.blocks.0-1.attn, s.1.blocks.0-1.attn"),
        (["b.0.x.attn", "b.0.y.attn", "b.1.x.attn", "b.1.y.attn"], "b.0-1.x.attn, b.0-1.y.attn"),
        (["attn", "norm"], "attn, norm"),
        (["stages.1.attn2d"], "stages.1.attn2d"),
        (["0", "1"], "0-1"),
        ([], ""),
    ],
)
def test_names_are_joined_by_their_running_index(names: list[str], said: str) -> None:
    assert join_names(names) == said


def test_a_message_becomes_one_line() -> None:
    assert one_line(" a  b\n  c\r\nd ") == "a  b c d"
