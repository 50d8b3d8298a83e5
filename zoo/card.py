"""The model card: all that is needed to rebuild a model and to feed it, as strict JSON. Imports no torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, ValidationError, field_validator

from zoo.errors import BundleError

FORMAT_VERSION: Final = 2
"""1 knew no engine."""
MAX_CARD_BYTES: Final = 16_000_000
"""No card is larger: one of 21,841 classes takes 1 MB."""

NOT_IN_KWARGS = {
    "attention",
    "cache_dir",
    "checkpoint_path",
    "init",
    "num_classes",
    "pretrained",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "seed",
}

Name = Annotated[str, Field(min_length=1)]
Side = Annotated[int, Field(ge=1)]
Deviation = Annotated[float, Field(gt=0)]


class _Strict(BaseModel):
    """What every part of a card has in common."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Preprocessing(_Strict):
    """How an image becomes the model's input: timm's evaluation transform, as numbers."""

    size: tuple[Side, Side]
    """Height and width of the model's input, in pixels."""
    crop_pct: Annotated[float, Field(gt=0, le=2)] = 1.0
    """Part of the resized image that the crop keeps, by side; above 1 the crop is padded."""
    crop_mode: Literal["center", "squash", "border"] = "center"
    """center: short side fitted, middle kept. squash: both sides fitted. border: long side fitted, rest padded."""
    interpolation: Literal["nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"] = "bicubic"
    """Resampling filter of the resize."""
    mean: tuple[float, float, float]
    """Subtracted from each channel (red, green, blue) of an image in 0-1."""
    std: tuple[Deviation, Deviation, Deviation]
    """Each channel is divided by this, after `mean` was subtracted."""

    @classmethod
    def from_timm(cls, data_config: Mapping[str, object]) -> Self:
        """Read the dict that `timm.data.resolve_model_data_config(model)` gives.

        timm takes `input_size` from the backbone's default configuration. A model built with another `img_size`
        wants `resolve_model_data_config(model, args={"img_size": ...})`.

        Raises:
            ValueError: If a key is missing, or a value has no place in a card (images of other than 3 channels).
        """
        wanted = ("input_size", "crop_pct", "crop_mode", "interpolation", "mean", "std")
        missing = [key for key in wanted if key not in data_config]
        if missing:
            raise ValueError(
                f"data_config lacks {', '.join(missing)}; got {', '.join(sorted(data_config)) or 'nothing'}"
            )
        channels, *size = _numbers("input_size", data_config["input_size"])
        if channels != 3:
            raise ValueError(f"data_config['input_size']: images have 3 channels here, got {channels}")
        fields = {key: data_config[key] for key in ("crop_pct", "crop_mode", "interpolation")}
        for key in ("mean", "std"):
            fields[key] = tuple(_numbers(key, data_config[key]))
        return cls.model_validate({"size": tuple(size), **fields})


class Lineage(_Strict):
    """Where a bundle comes from."""

    run_id: str | None = None
    """The MLflow run that trained it."""
    git_commit: str | None = None
    """The commit of the training code."""
    packages: dict[str, str] = Field(default_factory=dict)
    """Versions of the packages that it was trained with, by name."""


class PluginSource(_Strict):
    """What registers a variant that is not built in. Its code is in no bundle: whoever loads one brings it along."""

    name: Name
    """The file's name, such as my_attention.py, or the module's, such as my_package.attention."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """Hash of the file that the model was trained with; null where there was none."""
    distribution: Name | None = None
    """The installed package that offered the variant, by its name on an index."""
    version: Name | None = None
    """Version of that package."""


class EngineChoice(_Strict):
    """What computes the answers of whoever serves the model: chosen when it is published, so that replicas agree."""

    name: Literal["eager", "compile", "onnx"] = "eager"
    """eager: torch. compile: torch.compile. onnx: ONNX Runtime, from the bundle's model.onnx."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 computes in bfloat16 where torch's autocast does; for eager and compile."""


def _take_name(plugin: object) -> object:
    return PluginSource(name=plugin) if isinstance(plugin, str) else plugin  # older cards hold names alone


class ModelCard(_Strict):
    """Everything about a model but its weights."""

    format_version: Literal[1, 2] = FORMAT_VERSION
    """Version of the bundle's format."""
    backbone: Name
    """timm's name of the backbone."""
    timm_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of `zoo.create_model`, but for `num_classes`: that is the number of `class_names`."""
    attention: Name = "linear"
    """The registered attention variant."""
    attention_options: dict[str, JsonValue] = Field(default_factory=dict)
    """Options of the variant, where it has any."""
    plugins: tuple[Annotated[PluginSource, BeforeValidator(_take_name)], ...] = ()
    """What registers the variant, where it is not built in; `zoo.plugin_sources(attention)` knows it."""
    class_names: Annotated[tuple[Name, ...], Field(min_length=2)]
    """The classes in the order of the logits."""
    preprocessing: Preprocessing
    """How an image becomes the model's input."""
    engine: EngineChoice = EngineChoice()
    """What computes the answers where it is served."""
    weights: Literal["raw", "ema"] = "raw"
    """Whether the weights are the trained ones or their exponential moving average."""
    lineage: Lineage = Field(default_factory=Lineage)
    """Where the bundle comes from."""
    metrics: dict[str, float] = Field(default_factory=dict)
    """What the model scored, by metric name (`val/top1` in 0-1)."""
    data_fingerprint: str | None = None
    """Fingerprint of the validation data that `metrics` were measured on."""

    @field_validator("class_names")
    @classmethod
    def _check_unique(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"class names must be unique, got {', '.join(map(repr, twice))} more than once")
        return names

    @field_validator("timm_kwargs", "attention_options")
    @classmethod
    def _check_json(cls, options: dict[str, JsonValue]) -> dict[str, JsonValue]:
        json.dumps(options, allow_nan=False)  # a NaN here would be written as a null and come back as one
        return options

    @field_validator("backbone")
    @classmethod
    def _check_self_contained(cls, backbone: str) -> str:
        if ":" in backbone or "/" in backbone:
            raise ValueError(f"{backbone!r} points outside the bundle; give the architecture's name in timm")
        return backbone

    @field_validator("timm_kwargs")
    @classmethod
    def _check_not_ours(cls, timm_kwargs: dict[str, JsonValue]) -> dict[str, JsonValue]:
        ours = sorted(NOT_IN_KWARGS & set(timm_kwargs))
        if ours:
            raise ValueError(f"leave {', '.join(ours)} out: a bundle brings its own classes and weights")
        return timm_kwargs


class _Version(BaseModel):
    """The one field that every version of the format has."""

    model_config = ConfigDict(strict=True, extra="ignore")
    format_version: int


def read_card(path: Path) -> ModelCard:
    """Read and check the card in the JSON file `path`.

    Raises:
        BundleError: If the file is missing or no card, or of a newer format; the message names the fields.
    """
    try:
        if path.stat().st_size > MAX_CARD_BYTES:
            raise BundleError(f"{path}: not a model card: more than {MAX_CARD_BYTES:,} bytes")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{path}: cannot read the card ({error})") from error
    try:
        version = _Version.model_validate_json(text).format_version  # first: a newer card may have other fields
        if version > FORMAT_VERSION:
            raise BundleError(
                f"{path}: format_version {version} is newer than {FORMAT_VERSION}, the newest known here; "
                "upgrade attention-zoo"
            )
        return ModelCard.model_validate_json(text)
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, e['loc'])) or 'JSON'}: {e['msg']}" for e in error.errors(include_url=False))
        raise BundleError(f"{path}: not a model card: {'; '.join(faults)}") from error


def write_card(card: ModelCard, path: Path) -> None:
    """Write `card` to the file `path` as UTF-8 JSON of the newest format, whatever the locale is."""
    newest = card.model_copy(update={"format_version": FORMAT_VERSION})
    path.write_text(newest.model_dump_json(indent=2) + "\n", encoding="utf-8")


def _numbers(key: str, value: object) -> list[float]:
    if not isinstance(value, tuple | list) or len(value) != 3 or not all(isinstance(v, int | float) for v in value):
        raise ValueError(f"data_config[{key!r}]: three numbers are wanted, got {value!r}")
    return list(value)
