"""Folders that `timm.create_model("local-dir:...", pretrained=True)` loads: timm's `config.json` and safetensors.

What timm's configuration has no field for (lineage, metrics, raw or EMA weights) goes under a key of our own in
`config.json`, which timm passes over, so that nothing is lost on the way back.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from pydantic import JsonValue, ValidationError
from timm.models._hub import save_config_for_hf
from torch import nn

from zoo.card import NOT_IN_KWARGS, ModelCard, Preprocessing
from zoo.errors import BundleError
from zoo.files.bundle_files import WEIGHTS
from zoo.files.part_ties import TIES
from zoo.files.sources import CONFIG, OURS, read_json
from zoo.files.tensor_files import same_bits, write_tensors

_OF_OTHER_WEIGHTS = (  # what timm's configuration says of the weights that timm gives away
    *("tag", "license", "description", "origin_url", "paper_name", "paper_ids", "notes"),
    *("label_names", "label_descriptions", "label_offset"),
)


def write_timm_folder(
    model: nn.Module, card: ModelCard, folder: Path, part_ties: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Write a stock timm model into the empty `folder`.

    Args:
        model: The model, built by timm, with timm's own attention.
        card: What it is.
        folder: An existing directory.
        part_ties: What was untied to make it stock timm's, to be kept for the way back (`untie_parts`).

    Returns:
        Its ties, {further name: first name}; timm knows none, so each tensor is written under each of its names.

    Raises:
        BundleError: If timm cannot describe the model, or two tensors overlap without being the same.
    """
    known = model.pretrained_cfg
    assert isinstance(known, dict)
    vars(model)["pretrained_cfg"] = {key: value for key, value in known.items() if key not in _OF_OTHER_WEIGHTS}
    look = card.preprocessing
    ours = card.model_dump(mode="json") | ({TIES: dict(part_ties)} if part_ties else {})
    try:
        save_config_for_hf(
            model,
            str(folder / CONFIG),
            model_config={"label_names": list(card.class_names), OURS: ours},
            model_args=dict(card.timm_kwargs),
            data_config={"input_size": (3, *look.size), **look.model_dump(exclude={"size"})},
        )
        ties = write_tensors(folder / WEIGHTS, model.state_dict(), every_name=True)
    except (AssertionError, ValueError) as error:
        raise BundleError(f"{folder}: timm's format cannot hold this model: {error}") from error
    finally:
        vars(model)["pretrained_cfg"] = known
    shutil.copymode(folder / CONFIG, folder / WEIGHTS)  # safetensors writes for the owner alone, whatever the umask
    return ties


def load_by_timm(folder: Path, model: nn.Module) -> nn.Module:
    """Let timm alone load `folder`, and hold what it gives to `model`, bit for bit; return it, in eval mode.

    Raises:
        BundleError: If timm refuses, or loads other tensors.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            loaded = timm.create_model(f"local-dir:{folder}", pretrained=True)
    except Exception as error:  # timm raises any class of error
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise BundleError(f"{folder}: timm does not load this model: {reason}") from error
    got, wanted = loaded.state_dict(), model.state_dict()
    if wrong := [name for name in wanted if name not in got or not same_bits(got[name], wanted[name].cpu())]:
        raise BundleError(f"{folder}: timm loads another {wrong[0]} than was saved")
    assert isinstance(loaded, nn.Module)
    return loaded.eval()


def describe_timm_model(
    model: nn.Module, backbone: str, args: Mapping[str, Any], *, class_names: Sequence[str] | None, beside: Path | None
) -> tuple[ModelCard, list[str]]:
    """Make the card of a model that timm built with pretrained weights.

    Args:
        model: The model.
        backbone: timm's name of it.
        args: The arguments it was built with.
        class_names: Names in the order of the logits; None takes timm's, or "class 0", "class 1", ...
        beside: The folder that it was loaded from, if any: what we left there goes into the card.

    Returns:
        The card, and what to tell the user.

    Raises:
        BundleError: If no card can describe the model: fewer than two classes, other than three channels, ...
    """
    config = model.pretrained_cfg
    assert isinstance(config, dict)
    names, notes = _name_classes(config.get("label_names"), int(getattr(model, "num_classes", 0)), class_names)
    try:
        card = ModelCard(
            backbone=backbone,
            timm_kwargs={key: value for key, value in args.items() if key not in NOT_IN_KWARGS},
            class_names=tuple(names),
            preprocessing=Preprocessing.from_timm(timm.data.resolve_model_data_config(model)),  # type: ignore[no-untyped-call]
        )
        ours = None if beside is None else read_json(beside / CONFIG).get(OURS)
        if ours is None:
            return card, [*notes, "no lineage, metrics or EMA flag: timm's format has none"]
        if isinstance(ours, dict):
            ours = {key: value for key, value in ours.items() if key != TIES}
        kept = ModelCard.model_validate_json(json.dumps(ours))
    except (ValidationError, ValueError) as error:
        raise BundleError(f"{beside or backbone}: {_first_line(error)}") from error
    if not _same_model(kept, card):
        return card, [*notes, f"{CONFIG}: {OURS} tells of another model; its lineage and metrics were left out"]
    same = {"class_names": card.class_names, "preprocessing": card.preprocessing, "attention": "linear", "plugins": ()}
    return kept.model_copy(update=same), notes


def _name_classes(labels: object, count: int, given: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Choose the class names: given, timm's, or numbers."""
    if given is not None:
        if len(given) != count:
            raise BundleError(f"class_names: got {len(given)}, the model has {count} classes")
        return list(given), []
    if isinstance(labels, dict):  # by index, with gaps where it likes
        labels = [labels.get(str(i), labels.get(i)) for i in range(count)]
    if isinstance(labels, list | tuple) and len(labels) == count and all(isinstance(name, str) for name in labels):
        return [str(name) for name in labels], []
    why = "timm names none" if labels is None else f"timm's label_names are not {count} names"
    return [f"class {i}" for i in range(count)], [f"classes are called class 0, class 1, ...: {why}"]


def _same_model(kept: ModelCard, card: ModelCard) -> bool:
    """Say whether the card that we left in the folder is of the model that timm's fields describe."""
    if kept.backbone.partition(".")[0] != card.backbone or len(kept.class_names) != len(card.class_names):
        return False
    return all(
        _square(key, value) == _square(key, card.timm_kwargs.get(key))
        for key, value in kept.timm_kwargs.items()
        if value is not None
    )


def _square(key: str, value: JsonValue) -> JsonValue:
    return [value, value] if key == "img_size" and isinstance(value, int) else value


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        found = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, found['loc']))}: {found['msg'].removeprefix('Value error, ')}"
    return str(error)
