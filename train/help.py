"""The help text of `python -m train`, generated from the config: each field with its type, default and docstring."""

import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from train.config import TrainConfig

_INTRO = """\
usage: python -m train [RECIPE] [--section.field VALUE ...] [--dry-run]
       accelerate launch --config_file accelerate_config.yaml -m train [RECIPE] ...

Train a recipe on every rank, track it in MLflow, register the model.

RECIPE is a packaged name ({recipes}; default {default}) or the path of a YAML file (recipe.yaml, ./recipes/mine.yaml).
Values: defaults, then the recipe, then the command line. A value is read as YAML: 1e-3, true, null, [a, b].

  --dry-run
      Check config, data, backbone and tracking in one process; train nothing.
  --list-recipes
      Print the names of the packaged recipes.
  --help, -h
      Print this.
"""
_TYPES = {int: "INT", float: "NUMBER", bool: "true|false", str: "TEXT", Path: "PATH", type(None): "null"}


def format_help(recipes: Sequence[str], default: str) -> str:
    """Return the whole help text; `recipes` are the packaged names."""
    blocks = [_INTRO.format(recipes=", ".join(recipes) or "none", default=default)]
    plain: list[tuple[str, FieldInfo]] = []
    sections: list[tuple[str, FieldInfo]] = []
    for name, field in TrainConfig.model_fields.items():
        (plain if section_of(field) is None else sections).append((name, field))
    blocks.append("the run\n" + "".join(_entry(name, field) for name, field in plain))
    for name, field in sections:
        section = section_of(field)
        assert section is not None
        title = f"{name}: {(section.__doc__ or '').splitlines()[0]}\n"
        blocks.append(title + "".join(_entry(f"{name}.{key}", inner) for key, inner in section.model_fields.items()))
    return "\n".join(blocks)


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the section that a field holds, or None for a plain value."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


@cache
def field_paths() -> tuple[tuple[str, ...], ...]:
    """Return the path of every field and section, such as ("optimizer", "lr")."""

    def walk(section: type[BaseModel], above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        for name, field in section.model_fields.items():
            yield (*above, name)
            inner = section_of(field)
            if inner is not None:
                yield from walk(inner, (*above, name))

    return tuple(walk(TrainConfig, ()))


def _entry(path: str, field: FieldInfo) -> str:
    default = "required" if field.is_required() else f"default {_show(field.get_default(call_default_factory=True))}"
    text = f"{' '.join((field.description or '').split())} ({default})"
    body = textwrap.fill(text, width=110, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False)
    return f"  --{path} {_kind(field.annotation)}\n{body}\n"


def _kind(annotation: object) -> str:
    """Name a type in the words of the command line."""
    if isinstance(annotation, type) and annotation in _TYPES:
        return _TYPES[annotation]
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _kind(inner[0])
    if origin is typing.Literal:
        return "|".join(map(str, inner))
    if origin is tuple:
        return "[" + ", ".join("..." if part is Ellipsis else _kind(part) for part in inner) + "]"
    if origin is Mapping:
        return "{KEY: VALUE}"
    return "|".join(map(_kind, inner))


def _show(value: object) -> str:
    """Write a default as one would on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_show, value)) + "]"
    return str(value)
