"""Where weights may come from on this machine: a bundle, a training's checkpoint, a folder of timm's, a file."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import JsonValue
from timm.models._hub import load_model_config_from_path

from zoo.card import MAX_CARD_BYTES, read_card
from zoo.errors import BundleError
from zoo.files.bundle_files import CARD, GOLDEN, WEIGHTS, check_digests, hint_inside
from zoo.files.part_ties import read_part_ties
from zoo.files.tensor_files import read_tensors
from zoo.plugin_check import check_plugins

CONFIG, STATE = "config.json", "state.json"  # timm's, and a training checkpoint's
OURS = "attention_zoo"  # the key in timm's configuration of what it has no field for
WANTED = f"a bundle, a checkpoint, a folder with timm's {CONFIG} and {WEIGHTS}, or a .safetensors file"


@dataclass(frozen=True)
class Source:
    """A safetensors file, and what the files beside it say of the model that it was saved from.

    Attributes:
        file: The weights.
        backbone: timm's name of the model, if that is known.
        attention: The variant whose names the tensors have; None if only the names themselves can tell.
        timm_kwargs: The arguments it was built with, as far as they are known.
        ties: {further name: first name} of what was tied and the file holds as parts of other tensors.
    """

    file: Path
    backbone: str | None = None
    attention: str | None = None
    timm_kwargs: Mapping[str, Any] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)


def find_source(path: Path) -> Source:
    """Say what weights lie at `path`; only the small files beside them are read.

    Raises:
        BundleError: If there is nothing to read at `path`, or what describes the weights is damaged.
    """
    try:
        is_folder = path.is_dir()
        path.stat()
    except FileNotFoundError as error:
        raise BundleError(f"{path}: nothing is there; wanted {WANTED}") from error
    except OSError as error:
        raise BundleError(f"{path}: cannot be read ({error.strerror})") from error
    if not is_folder:
        if path.suffix != ".safetensors":
            raise BundleError(f"{path}: not a .safetensors file, and no pickle is read; wanted {WANTED}")
        return Source(path)
    if (path / CARD).is_file():
        return _read_bundle(path)
    if (path / STATE).is_file():
        return _read_checkpoint(path)
    if (path / CONFIG).is_file():
        return read_timm_folder(path)
    if (path / WEIGHTS).is_file():
        return Source(path / WEIGHTS)
    raise BundleError(f"{path}: no {WEIGHTS} that could be read here; wanted {WANTED}{hint_inside(path)}")


def read_timm_folder(path: Path) -> Source:
    """Say what weights lie in a folder of timm's, whatever else lies there."""
    _, backbone, args = read_timm_config(path)
    ties = read_part_ties(read_json(path / CONFIG).get(OURS), path / CONFIG)
    return Source(path / WEIGHTS, backbone, timm_kwargs=args, ties=ties)


def read_timm_config(folder: Path) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """Read timm's `config.json` in `folder`: its pretrained_cfg, the architecture's name, and the arguments.

    Raises:
        BundleError: If the file is missing, or not such a configuration.
    """
    file = folder / CONFIG
    read_json(file)  # timm reads the file without looking
    try:
        pretrained_cfg, backbone, args = load_model_config_from_path(folder)
        if not isinstance(backbone, str) or not isinstance(args, dict) or not isinstance(pretrained_cfg, dict):
            raise TypeError("architecture, model_args or pretrained_cfg is of the wrong kind")
    except Exception as error:  # a missing or wrong key ends in any class of error
        raise BundleError(f"{file}: not a configuration of timm's ({type(error).__name__}: {error})") from error
    return pretrained_cfg, backbone, args


def read_json(file: Path) -> dict[str, JsonValue]:
    """Read a JSON object in UTF-8 of at most `MAX_CARD_BYTES`; raise BundleError for anything else."""
    try:
        if file.stat().st_size > MAX_CARD_BYTES:
            raise BundleError(f"{file}: more than {MAX_CARD_BYTES:,} bytes")
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BundleError(f"{file}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, BundleError):
            raise
        raise BundleError(f"{file}: not JSON in UTF-8 ({error})") from error
    if not isinstance(content, dict):
        raise BundleError(f"{file}: got a {type(content).__name__}, wanted an object")
    return content


def _read_bundle(path: Path) -> Source:
    card = read_card(path / CARD)
    check_plugins(card, path / CARD)
    for name in (WEIGHTS, GOLDEN):
        if not (path / name).is_file():
            raise BundleError(f"{path / name}: missing")
    check_digests(path, read_tensors(path / GOLDEN)[1].get("sha256", ""))
    return Source(path / WEIGHTS, card.backbone, card.attention, card.timm_kwargs)


def _read_checkpoint(path: Path) -> Source:
    """Read what a checkpoint of `train` says of its model: its config is flat, by dotted name."""
    config = read_json(path / STATE).get("config")
    if not isinstance(config, dict):
        raise BundleError(f"{path / STATE}: not a checkpoint's state: config is missing")
    prefix = "model.timm_kwargs."
    backbone, attention = config.get("model.backbone"), config.get("model.attention")
    if not isinstance(backbone, str) or not isinstance(attention, str):
        raise BundleError(f"{path / STATE}: not a checkpoint's state: it names no model.backbone or model.attention")
    kwargs = {key.removeprefix(prefix): value for key, value in config.items() if key.startswith(prefix)}
    return Source(path / WEIGHTS, backbone, attention, kwargs)
