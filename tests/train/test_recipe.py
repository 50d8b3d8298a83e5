import pytest

from train.errors import ConfigError
from train.recipe import describe, list_recipes, parse_value, parse_yaml, read_recipe


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1.", 1.0),
        ("+.5e-3", 0.0005),
        ("-1", -1),
        ("true", True),
        ("null", None),
        ("[1, a b]", [1, "a b"]),
        ("no", "no"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("010", "010"),
        ("2024-01-01", "2024-01-01"),
        ("a #b", "a #b"),
        ("'12'", "12"),
        ("日本 語", "日本 語"),
        ("sqlite:///x.db", "sqlite:///x.db"),
    ],
)
def test_value_is_read_as_yaml_1_2(text, value):
    got = parse_value(text, where="--x")
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2", "line 2.*key 'a' is given twice"),
        ("s:\n  b: 1\n  b: 2", "line 3.*key 'b' is given twice"),
        ("1: 2", "key 1 is not text"),
        ("a: [1", "not readable as YAML"),
        ("&a [*a]", "holds itself"),
        ("!!binary aGk=", "got a bytes"),
        ("!!float .nan", "finite"),
        ("!!python/object:os.system x", "not readable as YAML"),
        ("a: \x00", "not readable as YAML"),
    ],
)
def test_bad_yaml_is_one_line(text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse_yaml(text, where="recipe r")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("recipe r")


def test_star_on_the_line_says_how_to_quote_it():
    with pytest.raises(ConfigError, match=r"""--freeze: .*"'\*'\""""):
        parse_value("*", where="--freeze")


def test_packaged_recipes_are_found_and_read():
    assert "digits" in list_recipes()
    assert read_recipe("digits")["name"] == "digits"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "got nothing, wanted a mapping"),
        ("[1]", r"got \[1\], wanted a mapping"),
        ("x", "got 'x', wanted a mapping"),
    ],
)
def test_recipe_that_is_no_mapping_is_refused(tmp_path, content, message):
    path = tmp_path / "r.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_recipe(str(path))


def test_recipe_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read \(No such file"):
        read_recipe(str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_recipe(f"{tmp_path}/")
    (tmp_path / "latin.yaml").write_bytes("name: é".encode("latin-1"))
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_recipe(str(tmp_path / "latin.yaml"))


def test_unknown_recipe_names_the_nearest():
    with pytest.raises(ConfigError, match="unknown recipe 'digts', did you mean 'digits'"):
        read_recipe("digts")


def test_describe_speaks_yaml_and_is_short():
    assert [describe(v) for v in (None, True, 1, "a", {"a": 1})] == ["null", "true", "1", "'a'", "a mapping"]
    assert len(describe("x" * 500)) == 80
