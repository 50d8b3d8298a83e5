"""Recipes: YAML as plain mappings, from the package or from a file. Values on the command line use the same loader.

The loader knows YAML 1.2's plain values: `1e-3` is a number, `no` and `on` are text, and only true and false are
booleans. A key given twice is an error, where PyYAML would take the last.
"""

import json
import math
import re
from collections.abc import Hashable
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import JsonValue

from train.errors import ConfigError
from zoo.errors import did_you_mean

_SUFFIXES = (".yaml", ".yml")


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's plain values and without merge keys, dates or repeated keys."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  (PyYAML's own shape: a copy-on-write class attribute)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002
        """Build a mapping whose keys are texts, each given once."""
        mapping: dict[Hashable, Any] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is not text", key_node.start_mark)
            if key in mapping:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            mapping[key] = self.construct_object(value_node, deep=deep)
        return mapping


for _tag, _pattern, _first in (
    ("null", r"(?:~|null|Null|NULL|)", ["~", "n", "N", ""]),
    ("bool", r"(?:true|True|TRUE|false|False|FALSE)", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", list("-+0123456789")),
    ("float", r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?", list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern + r"\Z"), _first)


def list_recipes() -> tuple[str, ...]:
    """Return the names of the packaged recipes, sorted."""
    names = (entry.name for entry in (files("train") / "recipes").iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


def read_recipe(recipe: str) -> dict[str, JsonValue]:
    """Read a recipe as a plain mapping; nothing in it is checked yet.

    Args:
        recipe: The name of a packaged recipe, or the path of a YAML file: something with a slash or .yaml at its end.

    Raises:
        ConfigError: If there is no such recipe, or it is no YAML mapping in UTF-8.
    """
    if recipe.endswith(_SUFFIXES) or "/" in recipe:
        text = _read_text(Path(recipe))
    elif recipe in list_recipes():
        text = (files("train") / "recipes" / f"{recipe}.yaml").read_text(encoding="utf-8")
    else:
        near = did_you_mean(recipe, list_recipes()) or "; no recipe is packaged"
        raise ConfigError(f"unknown recipe {recipe!r}{near} (a file of your own: a path that ends in .yaml)")
    content = parse_yaml(text, where=f"recipe {recipe}")
    if not isinstance(content, dict):
        got = "nothing" if content is None else describe(content)
        raise ConfigError(f"recipe {recipe}: got {got}, wanted a mapping such as `name: digits`")
    return content


def parse_yaml(text: str, *, where: str) -> JsonValue:
    """Parse one YAML document; `where` opens the error line.

    Raises:
        ConfigError: If it is not YAML, repeats a key, or has a value that JSON does not know.
    """
    try:
        content: JsonValue = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = f", line {error.problem_mark.line + 1}" if error.problem_mark and "\n" in text.strip() else ""
        raise ConfigError(f"{where}{mark}: not readable as YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not readable as YAML: {' '.join(str(error).split())}") from error
    _check_json(content, where, ())
    return content


def parse_value(text: str, *, where: str) -> JsonValue:
    """Parse a value from the command line: as YAML, but plain text is taken as it stands, `a #b` included.

    Raises:
        ConfigError: If it is not YAML.
    """
    try:
        value = parse_yaml(text, where=where)
    except ConfigError as error:
        raise ConfigError(f"""{error}; text wants quotes inside the shell's: "'{text}'\"""") from error
    return text if isinstance(value, str) and text[:1] not in ("'", '"') else value


def describe(value: JsonValue) -> str:
    """Phrase a value for an error line: scalars as they are, long or nested ones by kind."""
    if isinstance(value, dict):
        return "a mapping"
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"recipe {path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"recipe {path}: not UTF-8 text (byte {error.start})") from error


def _check_json(value: object, where: str, parents: tuple[int, ...]) -> None:
    """Refuse what explicit tags (`!!binary`, `!!set`) and aliases to oneself can still make."""
    if isinstance(value, dict | list):
        if id(value) in parents:
            raise ConfigError(f"{where}: not readable as YAML: a value holds itself")
        for child in value.values() if isinstance(value, dict) else value:
            _check_json(child, where, (*parents, id(value)))
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where}: got {value}, wanted a finite number")
    elif not isinstance(value, str | int | float | None):
        raise ConfigError(f"{where}: got a {type(value).__name__}, wanted text, number, boolean, list or mapping")
