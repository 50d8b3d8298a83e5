"""Augmentation of training images: timm.data's transforms under the config's names."""

import random
from collections.abc import Callable

import torch
from PIL import Image
from timm.data.transforms_factory import create_transform
from torch import Tensor
from torchvision import transforms  # type: ignore[import-untyped]

from train.config import AugmentConfig
from train.errors import ConfigError
from zoo.card import Preprocessing
from zoo.preprocess import transform_image

Augmentation = Callable[[Image.Image], Tensor]


def build_augmentation(augment: AugmentConfig, preprocessing: Preprocessing) -> Augmentation:
    """Build the function from an RGB image to a training input, (3, height, width), normalised as in evaluation.

    It draws from Python's, numpy's and torch's global streams. `augment.enabled` is the caller's to heed.

    Raises:
        ConfigError: If timm does not know the auto_augment policy.
    """
    try:
        primary, secondary, final = create_transform(
            preprocessing.size,
            is_training=True,
            scale=augment.scale,
            ratio=augment.ratio,
            hflip=augment.hflip,
            color_jitter=augment.color_jitter or None,  # type: ignore[arg-type]
            auto_augment=augment.auto_augment,
            interpolation=preprocessing.interpolation,
            mean=preprocessing.mean,
            std=preprocessing.std,
            re_prob=augment.erase_probability,
            re_mode="pixel",
            separate=True,
        )
    except (AssertionError, ValueError, KeyError, IndexError) as error:
        reason = " ".join(str(error).split()) or "timm does not know it"
        raise ConfigError(
            f"augment.auto_augment: got {augment.auto_augment!r} ({reason}), wanted one of timm's policies, "
            "such as rand-m9-mstd0.5-inc1, augmix-m3-w3 or original"
        ) from error
    geometry, *flips = primary.transforms
    if augment.crop == "shift":
        geometry = _build_evaluation_crop(preprocessing)
    steps = [geometry, *flips, *secondary.transforms, _Normalise(preprocessing)]
    if augment.shift_px:
        steps.append(_Shift(augment.shift_px))
    _to_tensor, _normalise, *erase = final.transforms  # the first two are ours: serving's own, and quicker
    return transforms.Compose([*steps, *erase])  # type: ignore[no-any-return]


def _build_evaluation_crop(preprocessing: Preprocessing) -> Callable[[Image.Image], Image.Image]:
    """Build timm's evaluation resize and crop, image to image; `zoo.preprocess` does the same, bit for bit."""
    evaluation = create_transform(
        preprocessing.size,
        interpolation=preprocessing.interpolation,
        mean=preprocessing.mean,
        std=preprocessing.std,
        crop_pct=preprocessing.crop_pct,
        crop_mode=preprocessing.crop_mode,
    )
    return transforms.Compose(evaluation.transforms[:-2])  # type: ignore[no-any-return]


class _Normalise:
    """Makes an image of the input's size the input, (3, height, width), as serving does."""

    def __init__(self, preprocessing: Preprocessing) -> None:
        self._whole = preprocessing.model_copy(update={"crop_pct": 1.0, "crop_mode": "center"})

    def __call__(self, image: Image.Image) -> Tensor:
        return torch.from_numpy(transform_image(image, self._whole))


class _Shift:
    """Moves an input by up to `shift_px` pixels in x and in y; edge pixels are repeated."""

    def __init__(self, shift_px: int) -> None:
        self._shift_px = shift_px

    def __call__(self, x: Tensor) -> Tensor:
        for dim in (1, 2):
            move = random.randint(-self._shift_px, self._shift_px)
            if move:
                last = x.shape[dim] - 1
                x = x.index_select(dim, torch.arange(move, move + last + 1).clamp_(0, last))
        return x
