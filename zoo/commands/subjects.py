"""What the command line's BACKBONE stands for: a timm name, a folder of timm's, or a bundle."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR
from typing import Any, Literal

import timm
from torch import nn

from zoo.bundle import load_bundle
from zoo.card import ModelCard
from zoo.create import create_model
from zoo.errors import BackboneError, ZooError
from zoo.files.bundle_files import CARD
from zoo.files.sources import CONFIG, STATE
from zoo.pretrained import find_report
from zoo.registry import list_attentions


@dataclass(frozen=True)
class Subject:
    """A model to look at, and what is known of it.

    Attributes:
        model: The model, on the CPU.
        title: What it is, for people, in one or more lines.
        facts: The same for a program, as plain JSON values.
        init: The scheme that drew attention's projections; None where timm drew them, or nobody.
        is_trained: Whether its weights come from a file.
        image_shape: Channels, height and width of its input.
    """

    model: nn.Module
    title: str
    facts: Mapping[str, Any]
    init: str | None
    is_trained: bool
    image_shape: tuple[int, int, int]


def load_subject(
    backbone: str,
    attention: str | None,
    *,
    init: str | None = None,
    seed: int = 0,
    pretrained: bool | str = False,
    timm_kwargs: Mapping[str, Any] | None = None,
) -> Subject:
    """Build or load the model that a command line asks for.

    Args:
        backbone: As for `zoo.create_model`, or the directory of a bundle.
        attention: A registered variant; None for a bundle, whose card names it.
        init: As for `zoo.create_model`; not for a bundle.
        seed: Of everything random.
        pretrained: As for `zoo.create_model`; not for a bundle.
        timm_kwargs: Keyword arguments of timm's; not for a bundle.

    Raises:
        ZooError: If there is no such thing, or an option does not belong to it.
    """
    kwargs = dict(timm_kwargs or {})
    if _find_kind(Path(backbone) / CARD) == "file":
        options = {"--init": init, "--pretrained": pretrained, "--model-kwargs": kwargs}
        given = [name for name, value in options.items() if value]
        if given:
            raise ZooError(f"{backbone}: a bundle has weights and arguments of its own; leave {given[0]} out")
        return _load(Path(backbone), attention)
    _check_path(backbone)
    if attention is None:
        raise ZooError(
            f"{backbone}: --attention is missing: {', '.join(list_attentions())}; only a bundle names its own"
        )
    model = create_model(backbone, attention, pretrained=pretrained, init=init, seed=seed, **kwargs)
    report = find_report(model)
    drawn = f"weights of {report.source}" if report else f"drawn by {init or 'timm'}, seed {seed}"
    options_ = "".join(f", {key}={value!r}" for key, value in kwargs.items())
    return Subject(
        model=model,
        title="\n".join([f"{backbone}{options_}: {attention}, {drawn}", *(report.adapted if report else ())]),
        facts={
            "backbone": backbone,
            "attention": attention,
            "init": init,
            "seed": seed,
            "model_kwargs": kwargs,
            "pretrained": {"source": report.source, "adapted": list(report.adapted)} if report else None,
            "bundle": None,
        },
        init=init,
        is_trained=report is not None,
        image_shape=_find_shape(model, kwargs),
    )


def _load(path: Path, attention: str | None) -> Subject:
    model, card = load_bundle(path)
    if attention not in (None, card.attention):
        raise ZooError(
            f"{path}: holds attention {card.attention!r}, not {attention!r}; leave --attention out, or convert the "
            "bundle first (python -m zoo convert)"
        )
    return Subject(
        model=model,
        title=_describe_card(path, card),
        facts={
            "backbone": card.backbone,
            "attention": card.attention,
            "init": None,
            "seed": None,
            "model_kwargs": card.timm_kwargs,
            "pretrained": None,
            "bundle": {"path": str(path)} | card.model_dump(mode="json"),
        },
        init=None,
        is_trained=True,
        image_shape=(3, *card.preprocessing.size),
    )


def _describe_card(path: Path, card: ModelCard) -> str:
    height, width = card.preprocessing.size
    options = "".join(f", {key}={value!r}" for key, value in card.timm_kwargs.items())
    weights = {"raw": "as trained", "ema": "averaged (EMA)"}[card.weights]
    lines = [
        f"bundle {path}: {card.backbone}{options}: {card.attention}, weights {weights}",
        f"{len(card.class_names)} classes, images of {height} x {width} pixels",
    ]
    origin = {"run": card.lineage.run_id, "commit": card.lineage.git_commit}
    said = [f"{name} {value}" for name, value in origin.items() if value]
    said += [f"{name} {value:.4g}" for name, value in card.metrics.items()]
    return "\n".join([*lines, *([", ".join(said)] if said else [])])


def _check_path(backbone: str) -> None:
    """Refuse what is on the disk and is no bundle, with the way out."""
    wanted = "wanted a timm name, a bundle's directory, or local-dir: and a folder of timm's"
    if not backbone.strip():
        raise BackboneError(f"BACKBONE {backbone!r} is empty; {wanted}")
    if timm.is_model(backbone) or backbone.startswith(("local-dir:", "hf-hub:")):
        return
    kind = _find_kind(Path(backbone))
    if kind == "directory":
        if _find_kind(Path(backbone) / CONFIG):
            raise BackboneError(f"{backbone}: a folder of timm's; write local-dir:{backbone}")
        if _find_kind(Path(backbone) / STATE):
            raise BackboneError(f"{backbone}: a training's checkpoint; give the bundle that the training wrote")
        raise BackboneError(f"{backbone}: a directory without {CARD}; {wanted}")
    if kind == "file":
        raise BackboneError(f"{backbone}: a file; {wanted}")
    if os.sep in backbone or backbone.startswith((".", "~")):
        raise BackboneError(f"{backbone}: nothing is there; {wanted}")


def _find_kind(path: Path) -> Literal["directory", "file", ""]:
    """Say what is at a path; "" if nothing is, or the name is none for a path."""
    try:
        return "directory" if S_ISDIR(path.stat().st_mode) else "file"
    except PermissionError as error:
        raise BackboneError(f"{path}: cannot be read ({error.strerror})") from error
    except (OSError, ValueError):  # a name that is too long, or with a null
        return ""


def _find_shape(model: nn.Module, timm_kwargs: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return channels, height and width of the images that a timm model built with these arguments takes."""
    config = timm.data.resolve_model_data_config(model)  # type: ignore[no-untyped-call]
    channels, height, width = config["input_size"]
    size = timm_kwargs.get("img_size") or (height, width)
    height, width = (size, size) if isinstance(size, int) else size
    return int(timm_kwargs.get("in_chans") or channels), int(height), int(width)
