"""The command line: a flag for each setting, and a mistake told in one line by the flag or variable that holds it."""

import argparse
import logging
import os
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, NoReturn, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from serve.errors import SettingsError
from serve.settings import GROUPS, Settings
from zoo.errors import did_you_mean

logger = logging.getLogger(__name__)

_PREFIX = "SERVE_"
_KUBERNETES = re.compile(r"SERVE_(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?)")
_TUPLES = ("plugins", "trusted_proxies")
_EPILOG = (
    "Every setting is also an environment variable: SERVE_PORT=8080, SERVE_PIN=true and so on; a flag wins over it."
)


def read_settings(argv: Sequence[str] | None = None) -> Settings:
    """Merge defaults, the environment's SERVE_* and the command line, the last winning.

    Raises:
        SettingsError: If a flag is unknown, or a value does not fit.
        SystemExit: After `--help`.
    """
    given = vars(_build_parser().parse_args(argv))
    try:
        return Settings(**given)
    except ValidationError as error:
        raise SettingsError("; ".join(_describe(fault, given) for fault in error.errors(include_url=False))) from error


def warn_of_unknown(environment: Mapping[str, str]) -> None:
    """Warn of variables that look like settings and are none, so that a slip is not taken for a default.

    What Kubernetes sets by itself for a Service that is called "serve" is passed over.
    """
    for name in sorted(environment):
        setting = name.upper().removeprefix(_PREFIX).lower()
        is_ours = name.upper().startswith(_PREFIX) and not _KUBERNETES.fullmatch(name)
        if is_ours and setting not in Settings.model_fields:
            near = [variable_of(found) for found in get_close_matches(setting, Settings.model_fields, n=1)]
            hint = f", did you mean {near[0]}?" if near else ""
            logger.warning("%s is no setting and is not read%s", name, hint)


def flag_of(name: str) -> str:
    """Name a setting's flag; the model's URI is given without one."""
    return "MODEL_URI" if name == "model_uri" else f"--{name.replace('_', '-')}"


def variable_of(name: str) -> str:
    """Name a setting's environment variable."""
    return f"{_PREFIX}{name.upper()}"


def show_default(field: FieldInfo) -> str:
    """Write a setting's default as one would give it."""
    default = field.default
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        return ",".join(default) or "none"
    return "none" if default is None or default == "" else str(default)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage: a mistake is one line, and `--help` explains."""
        unknown = re.fullmatch(r"unrecognized arguments: (-\S+).*", message)
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings]
            name = unknown[1].partition("=")[0]
            raise SettingsError(f"unknown flag {name}{did_you_mean(name, flags)}")
        raise SettingsError(message)


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m serve",
        usage="%(prog)s [MODEL_URI ...] [--port PORT] [--flag VALUE ...]",
        description="Answer over HTTP for models out of the MLflow registry (MLFLOW_TRACKING_URI says which).",
        epilog=_EPILOG,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for title, names in GROUPS.items():
        group = parser.add_argument_group(title)
        for name in names:
            _add(group, name, Settings.model_fields[name])
    return parser


def _add(group: Any, name: str, field: FieldInfo) -> None:
    text = " ".join(f"{field.description} Default: {show_default(field)}".split()).replace("%", "%%")
    flag = flag_of(name)
    if name == "model_uri":
        group.add_argument(name, nargs="*", metavar=flag, default=argparse.SUPPRESS, help=text)
    elif field.annotation is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
    elif name in _TUPLES:
        group.add_argument(flag, action="append", metavar="VALUE", help=text)
    else:
        group.add_argument(flag, metavar=_metavar(name, field), help=text)


def _metavar(name: str, field: FieldInfo) -> str:
    if get_origin(field.annotation) is Literal:
        return f"{{{','.join(get_args(field.annotation))}}}"
    for suffix, unit in (("_s", "SECONDS"), ("_ms", "MS"), ("_bytes", "BYTES"), ("_file", "FILE")):
        if name.endswith(suffix):
            return unit
    return "VALUE"


def _describe(fault: Any, given: Mapping[str, object]) -> str:
    name = str(fault["loc"][0])
    source = flag_of(name) if name in given else variable_of(name)
    value, reason = fault["input"], fault["msg"].removeprefix("Value error, ")
    line = f"{source}: got {value!r:.80}, {reason[:1].lower()}{reason[1:]}"
    if name == "port" and source in os.environ and str(value).startswith("tcp://"):
        line += (
            '; Kubernetes sets it for a Service called "serve": say enableServiceLinks: false in the pod, '
            "or call the Service otherwise"
        )
    return line
