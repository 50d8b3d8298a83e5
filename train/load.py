"""From a command line to a checked TrainConfig: defaults < environment < recipe < `--section.field VALUE`.

The layers are merged as plain mappings and checked once, as JSON. Every mistake is one line of a ConfigError.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from pydantic import BaseModel, JsonValue, ValidationError

from train.config import ModelConfig, TrainConfig
from train.errors import ConfigError
from train.help import field_paths, format_help, section_of
from train.recipe import describe, list_recipes, parse_value, read_recipe
from zoo.errors import UnknownNameError

DEFAULT_RECIPE = "digits"
_SWITCHES = ("--help", "-h", "--list-recipes", "--dry-run")
_WANTED = {
    "string_type": "text (where YAML reads something else, in quotes of its own: \"'12'\")",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "tuple_type": "a list such as [a, b]",
    "path_type": "a path",
    "dict_type": "a mapping such as {depth: 6}",
}


@dataclass(frozen=True)
class Invocation:
    """What one command line asks for."""

    config: TrainConfig
    dry_run: bool
    recipe: str
    """The recipe as the user named it."""


def parse_command_line(argv: Sequence[str]) -> Invocation:
    """Read the arguments of `python -m train`, without the program's name.

    `--help` and `--list-recipes` write to standard output and leave with status 0, as argparse does.

    Raises:
        ConfigError: For any mistake, in one line.
        SystemExit: After --help or --list-recipes.
    """
    if {"--help", "-h"} & set(argv):
        _leave_with(format_help(list_recipes(), DEFAULT_RECIPE))
    if "--list-recipes" in argv:
        _leave_with("".join(f"{name}\n" for name in list_recipes()))
    recipes: list[str] = []
    flags: dict[str, str] = {}
    for name, value in _split(argv):
        if not name:
            recipes.append(value)
        elif name in flags:
            raise ConfigError(f"--{'dry-run' if name == 'dry_run' else name} is given twice")
        else:
            flags[name] = value
    if len(recipes) > 1:
        raise ConfigError(
            f"wanted one recipe, got {' and '.join(map(repr, recipes))}; a field is set by --section.field"
        )
    dry_run = flags.pop("dry_run", None) is not None
    recipe = recipes[0] if recipes else DEFAULT_RECIPE
    merged = read_recipe(recipe)
    _take_environment(merged, os.environ)
    for name, value in flags.items():
        set_path(merged, name, _read_value(name, value))
    return Invocation(validate(merged), dry_run, recipe)


def _read_value(name: str, text: str) -> JsonValue:
    """Read the value of a flag as YAML, but for a single glob, whose `*` would start an alias there.

    Raises:
        ConfigError: If it is not YAML.
    """
    names_parameters = name in ("freeze", "tie")
    if names_parameters and text.startswith("*"):
        return text
    try:
        return parse_value(text, where=f"--{name}")
    except ConfigError as error:
        if not (names_parameters and text.startswith("[") and "*" in text):
            raise
        raise ConfigError(f"--{name}: in a list, a text that starts with * wants quotes: ['*.bias', head]") from error


def _take_environment(merged: dict[str, JsonValue], environ: Mapping[str, str]) -> None:
    """Let MLflow's own variable say where runs are kept, where the recipe does not: in place."""
    uri, tracking = environ.get("MLFLOW_TRACKING_URI"), merged.get("tracking", {})
    if uri and isinstance(tracking, dict) and "uri" not in tracking:
        merged["tracking"] = {**tracking, "uri": uri}


def set_path(mapping: dict[str, JsonValue], path: str, value: JsonValue) -> None:
    """Set `path` (dotted) in place, making the sections it passes; a mapping is merged into what stands there.

    Raises:
        ConfigError: If a part of the path is a value, not a section.
    """
    *sections, last = path.split(".")
    for depth, section in enumerate(sections):
        inside = mapping.setdefault(section, {})
        if not isinstance(inside, dict):
            where = ".".join(sections[: depth + 1])
            raise ConfigError(f"--{path}: {where} is {describe(inside)} in the recipe, not a section")
        mapping = inside
    if isinstance(value, dict) and isinstance(mapping.get(last), dict):
        for key, child in value.items():
            set_path(mapping, f"{last}.{key}", child)
    else:
        mapping[last] = value


def validate(merged: Mapping[str, JsonValue]) -> TrainConfig:
    """Check a merged mapping against TrainConfig.

    Raises:
        ConfigError: In one line: each wrong field, what was got, what was wanted.
    """
    try:
        return TrainConfig.model_validate_json(json.dumps(merged))
    except ValidationError as error:
        lines = [_phrase(e["type"], e["loc"], e["msg"], e["input"]) for e in error.errors(include_url=False)]
        more = f"; and {len(lines) - 3} more" if len(lines) > 3 else ""
        raise ConfigError("; ".join(lines[:3]) + more) from error


def check_names(model: ModelConfig) -> None:
    """Check that the backbone, the attention, the init scheme and a path of weights exist, before any data is read.

    The plugins are loaded before.

    Raises:
        UnknownNameError: With the nearest right name.
        BackboneError: If nothing that could be loaded lies at the path `pretrained`.
        PluginError: If an installed package offers the attention and fails to load.
    """
    import timm  # here: --help need not wait for torch

    from zoo.create import find_pretrained
    from zoo.init import check_scheme
    from zoo.registry import find_attention

    find_attention(model.attention)
    if model.init is not None:
        check_scheme(model.init)
    if ":" not in model.backbone and not timm.is_model(model.backbone):
        raise UnknownNameError("backbone", model.backbone, timm.list_models(), "python -m zoo list shows them")
    if isinstance(model.pretrained, str):
        find_pretrained(model.pretrained)


def _split(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (field or switch, value) for each flag, and ("", text) for what stands alone."""
    tokens = iter(argv)
    for token in tokens:
        if not token.startswith("-"):
            yield "", token
            continue
        flag, equals, value = token.partition("=")
        if flag in _SWITCHES:
            if equals:
                raise ConfigError(f"{flag} takes no value, got {value!r}")
            yield flag.removeprefix("--").replace("-", "_"), ""
            continue
        if not flag.startswith("--") or not flag.strip("-"):
            raise ConfigError(f"unknown flag {flag!r}; a field is set by --section.field VALUE, see --help")
        name = flag.removeprefix("--").replace("-", "_")
        _check_known(name)
        if not equals:
            value = next(tokens, "--")
        if not value or value.startswith("--"):
            raise ConfigError(f"--{name} wants a value, as in --{name} VALUE")
        yield name, value


def _check_known(name: str) -> None:
    """Refuse a flag that names no field, before its value is looked at; timm_kwargs takes any key below it."""
    section: type[BaseModel] | None = TrainConfig
    parts = name.split(".")
    for depth, part in enumerate(parts):
        if section is None:
            if all(parts) and ".".join(parts[:depth]) == "model.timm_kwargs":
                return
            raise ConfigError(f"--{name}: {'.'.join(parts[:depth])} is a field, not a section")
        if part not in section.model_fields:
            raise ConfigError(f"unknown flag --{name}{_nearest(tuple(parts[: depth + 1]))}")
        section = section_of(section.model_fields[part])


def _nearest(path: tuple[str, ...]) -> str:
    """Phrase the nearest right key: among the siblings, else any field whose last part is alike."""
    *parents, last = path
    above = tuple(parents)
    siblings = [known[len(above)] for known in field_paths() if known[:-1] == above]
    near = [(*above, name) for name in get_close_matches(last, siblings, n=2)]
    near = near or [known for known in field_paths() if known[-1] == last]
    near = near or [known for known in field_paths() if get_close_matches(last, [known[-1]])]
    if near:
        return f", did you mean {' or '.join(repr('.'.join(names)) for names in near[:2])}?"
    return f"; {'.'.join(above) or 'the top level'} has {', '.join(siblings)}"


def _phrase(kind: str, loc: tuple[int | str, ...], message: str, got: JsonValue) -> str:
    path = ".".join(map(str, loc))
    if kind == "extra_forbidden":
        return f"unknown key {path!r}{_nearest(tuple(map(str, loc)))}"
    if kind == "missing" and isinstance(loc[-1], str):
        return f"{path} is missing; set it in the recipe or by --{path}"
    if kind == "missing":
        return f"{'.'.join(map(str, loc[:-1]))}: item {int(loc[-1]) + 1} of the list is missing"
    if kind == "value_error":
        return f"{path}: {message.removeprefix('Value error, ')}"
    wanted = _WANTED.get(kind, message.removeprefix("Input should be "))
    if kind in ("model_type", "model_attributes_type"):
        wanted = f"a section, whose fields are set as in --{path}.FIELD"
    if kind in ("too_long", "string_too_short"):
        return f"{path}: got {describe(got)}: {message}"
    return f"{path}: got {describe(got)}, wanted {wanted}"


def _leave_with(text: str) -> None:
    sys.stdout.write(text)
    raise SystemExit(0)
