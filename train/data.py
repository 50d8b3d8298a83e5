"""From the data section to a training and a validation set: read, check, augment, fingerprint.

Evaluation's images go through `zoo.preprocess.preprocess`, the function that serves.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from train.augment import Augmentation, build_augmentation
from train.config import AugmentConfig, DataConfig
from train.digits import read_digits
from train.draws import mix_seed, own_draws, seed_draws
from train.errors import ConfigError, DataError
from train.folders import read_folder
from train.images import Images, Split, drop_or_refuse_bad
from train.sampler import Draw
from zoo.card import Preprocessing
from zoo.errors import ImageError, did_you_mean
from zoo.preprocess import preprocess

BUILTIN: dict[str, Callable[[float, int], Split]] = {"builtin:digits": read_digits}
_AUGMENTATION = 1  # keeps augmentation's seeds apart from the order's
_log = logging.getLogger(__name__)

Item = tuple[Tensor, int]  # an input, (3, height, width), and its label


class TrainSet(Dataset[Item]):
    """Training images, augmented by draws that depend on (seed, epoch, index) alone."""

    def __init__(self, images: Images, augmentation: Augmentation, seed: int) -> None:
        self.images, self._augmentation, self._seed = images, augmentation, seed
        self._decoded: dict[int, Image.Image] = {}  # of images in memory, which are few and small

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, draw: Draw) -> Item:
        return self.__getitems__([draw])[0]

    def __getitems__(self, draws: Sequence[Draw]) -> list[Item]:
        """Return the items of a batch; the global random streams are left as they were."""
        with own_draws():
            return [self._augment(draw) for draw in draws]

    def find_seed(self, draw: Draw) -> int:
        """Return what an image's augmentation is seeded with, in one epoch."""
        return mix_seed(*self._numbers(draw))

    def _numbers(self, draw: Draw) -> tuple[int, int, int, int]:
        return self._seed, _AUGMENTATION, draw.epoch, draw.image

    def _augment(self, draw: Draw) -> Item:
        image = self._decode(draw.image)
        seed_draws(*self._numbers(draw))
        return self._augmentation(image), self.images.labels[draw.image]

    def _decode(self, index: int) -> Image.Image:
        if not isinstance(self.images.contents[index], bytes):
            return self.images.decode(index)
        if index not in self._decoded:
            self._decoded[index] = self.images.decode(index)
        return self._decoded[index]


class PlainSet(Dataset[Item]):
    """Images as evaluation and serving see them."""

    def __init__(self, images: Images, preprocessing: Preprocessing) -> None:
        self.images, self._preprocessing = images, preprocessing

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, draw: Draw | int) -> Item:
        index = draw if isinstance(draw, int) else draw.image
        try:
            array = preprocess(self.images.read(index), self._preprocessing)
        except ImageError as error:
            raise DataError(f"{self.images.where(index)}: {error}") from error
        return torch.from_numpy(array), self.images.labels[index]


@dataclass(frozen=True)
class Data:
    """What a run trains and is scored on."""

    train: TrainSet | PlainSet
    val: PlainSet
    class_names: tuple[str, ...]
    """In the order of the logits."""
    preprocessing: Preprocessing
    """The backbone's own with the data section's overrides: what belongs on the model's card."""
    seed: int

    @cached_property
    def val_fingerprint(self) -> str:
        """Names, labels and bytes of the validation images, hashed; scores compare where it is equal.

        Reads every validation image once.
        """
        return self.val.images.fingerprint(self.class_names, with_bytes=True)

    @cached_property
    def train_fingerprint(self) -> str:
        """Names, labels and sizes of the training images, hashed (bytes, where the images are in memory)."""
        return self.train.images.fingerprint(self.class_names, with_bytes=False)


def read_split(config: DataConfig) -> Split:
    """Read both parts and apply the policy for bad images; no model is needed for it.

    Raises:
        DataError: If the data cannot be trained on; one line that names the path.
    """
    if config.root in BUILTIN:
        return BUILTIN[config.root](config.val_fraction, config.split_seed)
    if config.root.startswith("builtin:"):
        raise ConfigError(f"data.root: unknown data set {config.root!r}{did_you_mean(config.root, BUILTIN)}")
    split = read_folder(Path(config.root), config.val_fraction, config.split_seed)
    train, bad_train = drop_or_refuse_bad(split.train, config.on_bad_image)
    val, bad_val = drop_or_refuse_bad(split.val, config.on_bad_image)
    bad = bad_train + bad_val
    if bad:
        total = len(split.train) + len(split.val)
        _log.warning("left out %d of %d images that cannot be read: %s", len(bad), total, "; ".join(bad[:20]))
    gone = [name for i, name in enumerate(split.class_names) if i not in set(train.labels)]
    if gone or not len(val):
        what = (
            f"class {', '.join(map(repr, gone))} has no sound training image" if gone else "no sound validation image"
        )
        raise DataError(f"data.root {config.root}: {what} left, {len(bad)} cannot be read, such as {bad[0]}")
    return Split(train, val, split.class_names)


def resolve_preprocessing(config: DataConfig, backbone: Preprocessing) -> Preprocessing:
    """Return the backbone's own preprocessing with the data section's overrides."""
    names = ("crop_pct", "interpolation", "mean", "std")
    overrides = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    return Preprocessing.model_validate({**backbone.model_dump(), **overrides})


def build_data(
    config: DataConfig, augment: AugmentConfig, preprocessing: Preprocessing, seed: int, *, split: Split | None = None
) -> Data:
    """Build the training and the validation set.

    Args:
        config: Where the images are.
        augment: How training images are changed.
        preprocessing: The backbone's own; the data section's overrides are applied here.
        seed: The run's seed, the same on all ranks.
        split: What `read_split(config)` gave, where it was called before: the model needs the number of classes.

    Raises:
        DataError: If the data cannot be trained on.
        ConfigError: If timm does not know the augmentation.
    """
    split = split or read_split(config)
    preprocessing = resolve_preprocessing(config, preprocessing)
    train: TrainSet | PlainSet = PlainSet(split.train, preprocessing)
    if augment.enabled:
        train = TrainSet(split.train, build_augmentation(augment, preprocessing), seed)
    return Data(train, PlainSet(split.val, preprocessing), split.class_names, preprocessing, seed)
