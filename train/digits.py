"""scikit-learn's handwritten digits as image files in memory: 1,797 real images of 8 x 8 pixels, ten classes."""

import io

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from sklearn.model_selection import train_test_split  # type: ignore[import-untyped]

from train.errors import DataError
from train.images import Images, Split


def read_digits(val_fraction: float = 0.2, split_seed: int = 0) -> Split:
    """Return the digits, a stratified part of them held out: 1,437 and 360 by default.

    Raises:
        DataError: If `val_fraction` leaves a part with too few images for the ten classes.
    """
    digits = load_digits()
    grey = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # (1797, 8, 8), from 0-16
    labels = digits.target.tolist()
    every = Images(
        tuple(f"{i:04d}.png" for i in range(len(labels))),
        tuple(labels),
        tuple(_encode_png(image) for image in grey),
    )
    try:
        train, val = train_test_split(
            range(len(every)), test_size=val_fraction, stratify=labels, random_state=split_seed
        )
    except ValueError as error:
        raise DataError(f"data.val_fraction {val_fraction} does not split the digits: {error}") from error
    return Split(every.select(train), every.select(val), tuple(str(name) for name in digits.target_names))


def _encode_png(image: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, format="PNG")
    return file.getvalue()
