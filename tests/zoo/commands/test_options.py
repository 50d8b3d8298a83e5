"""The grammar of the command line: values as they are meant, mistakes in one line."""

import pytest

from zoo.commands.options import build_parser, gather
from zoo.errors import ZooError

DESCRIBE = ["describe", "vit", "--attention", "linear"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("depth=6", 6),
        ("drop_path_rate=1e-3", 0.001),
        ("class_token=false", False),
        ("class_token=False", False),
        ("weight_init=null", None),
        ("global_pool=avg", "avg"),
        ("img_size=[32, 48]", [32, 48]),
        ("img_size=(32, 48)", (32, 48)),
        ("name=a=b", "a=b"),
        ("name=", ""),
        ("name=007", "007"),
        ("name={1, 2}", "{1, 2}"),
        ("name=NaN", "NaN"),
        ("name=1e999", "1e999"),
        ("name=" + "(" * 500, "(" * 500),
        ("num_classes=10", 10),
        ("name=日本", "日本"),
    ],
)
def test_a_value_is_read_as_json_or_python_or_else_as_text(text: str, value: object) -> None:
    given = build_parser().parse_args([*DESCRIBE, "--model-kwargs", text])
    (key,) = gathered = gather(given.model_kwargs)
    assert (key, gathered[key], type(gathered[key])) == (text.partition("=")[0], value, type(value))


def test_kwargs_add_up_and_a_key_given_twice_is_named() -> None:
    more = ["--model-kwargs", "depth=2", "num_heads=3", "--model-kwargs", "img_size=32"]
    assert gather(build_parser().parse_args([*DESCRIBE, *more]).model_kwargs) == {
        "depth": 2,
        "num_heads": 3,
        "img_size": 32,
    }
    twice = build_parser().parse_args([*DESCRIBE, *more, "depth=3"])
    with pytest.raises(ZooError, match="--model-kwargs: depth is given twice, as 2 and as 3"):
        gather(twice.model_kwargs)
    assert gather(build_parser().parse_args(DESCRIBE).model_kwargs) == {}  # one parse leaves nothing to the next


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "python -m zoo: the following arguments are required: COMMAND"),
        (["paint"], "python -m zoo: argument COMMAND: invalid choice: 'paint'"),
        (["describe"], "python -m zoo describe: the following arguments are required: BACKBONE"),
        (["convert", "a", "b"], "python -m zoo convert: the following arguments are required: --attention"),
        (["list", "--swappable", "--refused"], "argument --refused: not allowed with argument --swappable"),
        ([*DESCRIBE, "--seed", "x"], "argument --seed: wanted is a whole number, got 'x'"),
        ([*DESCRIBE, "--seed", "-1"], "argument --seed: wanted is a number from 0 to 2**63 - 1, got -1"),
        ([*DESCRIBE, "--seed", str(2**63)], "argument --seed: wanted is a number from 0 to 2**63 - 1"),
        ([*DESCRIBE, "--model-kwargs", "depth"], "wanted is KEY=VALUE, such as depth=6, got 'depth'"),
        ([*DESCRIBE, "--model-kwargs", "=6"], "wanted is KEY=VALUE, such as depth=6, got '=6'"),
        ([*DESCRIBE, "--model-kwargs", "de pth=6"], "wanted is KEY=VALUE, such as depth=6, got 'de pth=6'"),
        ([*DESCRIBE, "--model-kwargs", "seed=6"], "seed has a place of its own on the line"),
        ([*DESCRIBE, "--model-kwargs", "cache_dir=x"], "cache_dir is not passed on to timm"),
        ([*DESCRIBE, "--model-kwargs"], "argument --model-kwargs: expected at least one argument"),
        ([*DESCRIBE, "--batch"], "unrecognized arguments: --batch"),
        ([*DESCRIBE, "--frob\nnicate"], "unrecognized arguments: --frob nicate"),
        (["audit", "vit", "--batch", "0"], "argument --batch: wanted are 1 to 1024 images, got 0"),
        (["audit", "vit", "--batch", "99999"], "argument --batch: wanted are 1 to 1024 images, got 99999"),
        (["audit", "vit", "--bat"], "unrecognized arguments: --bat"),
    ],
)
def test_a_mistake_is_one_line_that_says_where_help_is(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args(arguments)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1
    assert " --help\n" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--help"], ("list", "describe", "audit", "convert")),
        (["list", "--help"], ("PATTERN", "--family", "--class", "--refused", "python -m zoo list 'vit_tiny*'")),
        (["describe", "--help"], ("BACKBONE", "--model-kwargs", "kaiming_raw", "python -m zoo describe vit_tiny")),
        (["audit", "--help"], ("--batch", "python -m zoo audit vit_tiny")),
        (["convert", "--help"], ("SRC", "DST", "python -m zoo convert")),
    ],
)
def test_help_explains_itself_with_an_example(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args(arguments)
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert [word for word in (*words, "examples:", "Exit status: 0 done, 2") if word not in out] == []
    assert all(len(line) <= 120 for line in out.splitlines())


def test_every_example_in_the_help_is_understood() -> None:
    from zoo.commands import options

    examples = [
        line
        for text in (options._LIST, options._DESCRIBE, options._AUDIT, options._CONVERT)
        for line in text.splitlines()
    ]
    assert len(examples) == 11
    for example in examples:
        assert example.startswith("python -m zoo ")
        build_parser().parse_args(example.replace("'", "").split()[3:])
