"""What is trained on: the images, and how they become inputs."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from train.fields import NonNegative, Positive, Probability, Range, Section, Text


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
