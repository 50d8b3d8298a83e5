import pytest

from train.config import TrainConfig
from train.help import field_paths, format_help
from train.load import parse_command_line


def test_help_names_every_field_with_type_default_and_docstring(capsys):
    with pytest.raises(SystemExit) as left:
        parse_command_line(["--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    for path in field_paths():
        if len(path) == 2:
            assert f"--{'.'.join(path)} " in text, path
    assert "--optimizer.lr NUMBER\n      Peak learning rate" in text
    assert "--loop.mixed_precision no|bf16|fp16" in text
    assert "(default 0.001)" in text
    assert "(required)" in text


def test_help_names_the_recipes():
    assert "(a, b; default a)" in format_help(("a", "b"), "a")


def test_help_lines_fit_a_terminal():
    assert max(map(len, format_help(("digits",), "digits").splitlines())) <= 120


def test_field_paths_hold_sections_and_fields():
    paths = field_paths()
    assert ("optimizer",) in paths
    assert ("optimizer", "lr") in paths
    assert {p[0] for p in paths} == set(TrainConfig.model_fields)
