"""What a run can be told: one section for each concern. A field's docstring is its help text on the command line.

Build a config with `train.load`; code that has values already uses `TrainConfig.model_validate_json`, since the
strict Python mode takes neither a list for a tuple nor text for a path.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, field_serializer, field_validator, model_validator

from train.fields import Count, Groups, Momentum, NonNegative, Positive, Probability, Range, Section, Seed, Text, Texts
from train.store import without_password


class ModelConfig(Section):
    """The backbone and its attention."""

    backbone: Text
    """timm's name of the backbone, as `python -m zoo list` shows it; or local-dir:FOLDER."""
    attention: Text = "linear"
    """Attention variant that replaces the backbone's own: linear, separate, parameter or one of your own."""
    plugins: Texts = ()
    """Files (my_attention.py) or modules that register attention variants of your own; one, or a list."""
    init: Text | None = None
    """Scheme that draws the attention's projections anew: timm, torch, trunc_normal, kaiming_raw or normal.
    null keeps what timm gave."""
    pretrained: bool | Text = False
    """Start from trained weights. true: timm's own (needs a network or a local-dir: backbone). A path: a bundle, a
    checkpoint RUN/checkpoints/step-..., a folder of timm's, or a .safetensors file. Another image size resamples
    positions, another class count gets a new head; the run says so."""
    timm_kwargs: Mapping[str, JsonValue] = Field(default_factory=dict)
    """timm's own keyword arguments of the backbone, such as `--model.timm_kwargs.depth 6`."""

    @field_validator("pretrained", mode="before")
    @classmethod
    def _check_pretrained(cls, pretrained: object) -> object:
        if not isinstance(pretrained, bool | str) or pretrained == "":
            raise ValueError(f"got {pretrained!r}, wanted true, false, or a path")
        return pretrained

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.pretrained and self.init is not None:
            raise ValueError(
                f"init {self.init!r} would redraw the pretrained weights; set init or pretrained, not both"
            )
        ours = {"backbone", "attention", "init", "seed", "pretrained"} & self.timm_kwargs.keys()
        if ours:
            raise ValueError(f"timm_kwargs: {', '.join(sorted(ours))} has its own field; leave it out of timm_kwargs")
        for key in self.timm_kwargs:
            if not key.isidentifier():
                raise ValueError(f"timm_kwargs: {key!r} is no name of an argument (YAML wants a space after a colon)")
        # JsonValue lets a NaN through, which would come back as null
        json.dumps(dict(self.timm_kwargs), allow_nan=False)
        if "num_classes" in self.timm_kwargs:
            raise ValueError("timm_kwargs: num_classes is read off the data; leave it out")
        return self


class DataConfig(Section):
    """The images and how they become the model's input."""

    root: Text
    """`builtin:digits` (scikit-learn's 1,797 handwritten digits), or a folder: ROOT/CLASS/*.jpg, or
    ROOT/train/CLASS/*.jpg and ROOT/val/CLASS/*.jpg."""
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Part of each class held out for validation, in 0-1, where the data has no validation part of its own."""
    split_seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of that split, apart from the run's own: runs with other seeds are still scored on the same images."""
    num_workers: Annotated[int, Field(ge=0)] = 0
    """Processes on each rank that decode and augment; 0 does it in the training process."""
    on_bad_image: Literal["error", "skip"] = "error"
    """error: check every header at the start, and stop where an image fails later. skip: decode all images at the
    start, and leave the bad ones out."""
    crop_pct: Annotated[float, Field(gt=0, le=2)] | None = None
    """Part of the resized image that evaluation's crop keeps, by side; null takes the backbone's own."""
    interpolation: Literal["nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"] | None = None
    """Resampling filter; null takes the backbone's own."""
    mean: tuple[float, float, float] | None = None
    """Subtracted from red, green, blue in 0-1; null takes the backbone's own."""
    std: tuple[Positive, Positive, Positive] | None = None
    """Divides red, green, blue after the mean is off; null takes the backbone's own."""


class AugmentConfig(Section):
    """Random changes of the training images, by timm.data."""

    enabled: bool = True
    """false trains on the very input that evaluation sees."""
    crop: Literal["random_resized", "shift"] = "random_resized"
    """random_resized: a random part, resized to the input. shift: evaluation's crop, moved by up to `shift_px`."""
    scale: Range = (0.08, 1.0)
    """Smallest and largest area of a random_resized crop, as part of the image's, in 0-1."""
    ratio: Range = (0.75, 4 / 3)
    """Smallest and largest width over height of a random_resized crop."""
    shift_px: Annotated[int, Field(ge=0)] = 0
    """Largest move of a shift crop, in pixels, in x and in y; edge pixels are repeated."""
    hflip: Probability = 0.5
    """Probability of a left-right flip."""
    color_jitter: NonNegative = 0.0
    """Strength of random brightness, contrast and saturation; 0 is none."""
    auto_augment: Text | None = None
    """timm's policy, such as rand-m9-mstd0.5-inc1; null is none."""
    erase_probability: Probability = 0.0
    """Probability of overwriting a random rectangle with noise."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, (low, high) in (("scale", self.scale), ("ratio", self.ratio)):
            if low > high:
                raise ValueError(f"{name}: smallest first, got [{low}, {high}]")
        if self.scale[1] > 1:
            raise ValueError(f"scale: a crop has at most the image's area, got {self.scale[1]}, wanted at most 1")
        if self.shift_px and self.crop != "shift":
            raise ValueError(f"shift_px {self.shift_px} needs crop: shift, got crop: {self.crop}")
        if self.auto_augment and self.color_jitter:
            raise ValueError("color_jitter has no effect beside auto_augment; set one of them")
        return self


class OptimizerConfig(Section):
    """AdamW and what surrounds one step."""

    lr: Positive = 1e-3
    """Peak learning rate at the global batch, whatever number of ranks makes it up: it is never rescaled."""
    weight_decay: NonNegative = 0.05
    """Decoupled weight decay, on matrices only: biases, norms, tokens and positions are exempt."""
    betas: tuple[Momentum, Momentum] = (0.9, 0.999)
    """Decay rates of the running mean and square of the gradient."""
    eps: Positive = 1e-8
    """Added to the denominator."""
    clip_grad_norm: Positive | None = 1.0
    """Largest norm of the whole gradient; null does not clip."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Part of each target spread over all classes, in 0-1."""


class ScheduleConfig(Section):
    """The learning rate over the run: linear warm-up, then a cosine."""

    epochs: Count = 90
    """Passes over the training images."""
    warmup_epochs: NonNegative = 5.0
    """Epochs over which the learning rate rises from near 0 to its peak."""
    min_lr_ratio: Probability = 0.0
    """Learning rate at the end, as part of the peak."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.warmup_epochs > self.epochs:
            raise ValueError(f"warmup_epochs {self.warmup_epochs:g} is more than epochs {self.epochs}; lower the first")
        return self


class LoopConfig(Section):
    """How a step is computed."""

    batch_size_per_rank: Count = 32
    """Images of one forward and backward on one rank."""
    accumulation_steps: Count = 1
    """Forwards and backwards for one optimizer step. Global batch = this x batch_size_per_rank x ranks."""
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    """Arithmetic of the forward."""
    compile: bool = False
    """Compile the model with torch.compile."""
    channels_last: bool = False
    """Keep images in channels-last memory order."""


class EvaluateConfig(Section):
    """Scoring on the validation images."""

    every_epochs: Count = 1
    """Epochs between evaluations; the last epoch is always scored."""
    batch_size_per_rank: Count = 64
    """Images of one forward on one rank."""

    def due(self, epoch: int) -> bool:
        """Return whether to evaluate after `epoch` epochs are done, counted from 1."""
        return epoch % self.every_epochs == 0


class CheckpointConfig(Section):
    """Saving the state of a run."""

    every_epochs: Count = 1
    """Epochs between checkpoints; the last epoch is always saved."""
    keep: Count = 2
    """Newest checkpoints to keep."""

    def due(self, epoch: int) -> bool:
        """Return whether to save after `epoch` epochs are done, counted from 1."""
        return epoch % self.every_epochs == 0


class LogConfig(Section):
    """What is told while training."""

    every_steps: Count = 50
    """Optimizer steps between two records of the training metrics."""
    progress: bool = True
    """Show a progress bar on the main process."""

    def due(self, step: int) -> bool:
        """Return whether to log after `step` optimizer steps are done, counted from 1."""
        return step % self.every_steps == 0


class TrackingConfig(Section):
    """Where MLflow keeps the run and the model."""

    uri: Text = "sqlite:///mlflow.db"
    """MLflow's tracking and registry URI; MLFLOW_TRACKING_URI changes the default."""
    experiment: Annotated[str, Field(min_length=1, max_length=500)] = "attention-zoo"
    """MLflow's experiment; made if it is missing."""

    @field_serializer("uri")
    def _hide_password(self, uri: str) -> str:
        return without_password(uri)  # what is dumped goes into runs and checkpoints, for all to read


class PublishConfig(Section):
    """What becomes of the trained model."""

    enabled: bool = True
    """Register the model as a version of `name`."""
    alias: Text = "champion"
    """Registry alias that moves to the version if it scores higher on the same validation images."""
    force: bool = False
    """Move the alias whatever the score, and on other validation images too."""

    @field_validator("alias")
    @classmethod
    def _check_alias(cls, alias: str) -> str:
        if not re.fullmatch(r"[\w-]{1,255}", alias):
            raise ValueError(f"got {alias!r}, wanted letters, digits, _ and - (255 at most)")
        if alias.lower() == "latest" or re.fullmatch(r"[vV]\d+", alias):
            raise ValueError(f"{alias!r} is reserved by MLflow; take another, such as champion")
        return alias


class TrainConfig(Section):
    """A whole run."""

    name: Text
    """Name of the registered model, and of the run's folder in `output_dir`."""
    seed: Seed = 0
    """Seed of weights, order of the images, augmentation and dropout."""
    output_dir: Path = Path("runs")
    """Folder for runs; this one writes to OUTPUT_DIR/NAME."""
    resume: Text | None = None
    """auto: go on from the newest whole checkpoint of OUTPUT_DIR/NAME, if there is one. A path: from that one."""
    tie: Groups = ()
    """Parameters that are to be one tensor, a text or a list of names for each tie: 'a.weight = b.weight', or a glob
    over all of them, as blocks.*.attn.qkv.to_q. The first one's values stay."""
    freeze: Texts = ()
    """What does not learn: names, paths, globs, blocks by number (from 0, both ends in), as in
    [patch_embed, blocks.0-5, '*.attn.*'], or 'all but head'. Norms frozen whole keep their running statistics."""
    model: ModelConfig
    data: DataConfig
    augment: AugmentConfig = AugmentConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    loop: LoopConfig = LoopConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    tracking: TrackingConfig = TrackingConfig()
    publish: PublishConfig = PublishConfig()

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        wrong = [c for c in "/:\\" if c in name]
        if wrong:
            raise ValueError(f"got {name!r}, but a registered model's name has no {' '.join(wrong)}")
        if name.startswith(".") or name != name.strip() or not name.isprintable() or len(name.encode()) > 200:
            raise ValueError(
                f"got {name!r}, wanted at most 200 bytes of printable text that starts with no dot or space"
            )
        return name

    @property
    def run_dir(self) -> Path:
        """The folder of this run: checkpoints, bundle, logs."""
        return self.output_dir / self.name
