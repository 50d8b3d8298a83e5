"""Photographs to send: crops of scikit-learn's two, as JPEG, about 27 KB each, no two alike."""

import io

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images


def make_photos(count: int = 32, *, side: int = 300, quality: int = 90, seed: int = 0) -> list[bytes]:
    """Return `count` JPEG files of `side` x `side` pixels."""
    sources, stream = load_sample_images().images, np.random.default_rng(seed)
    photos = []
    for i in range(count):
        source = sources[i % len(sources)]
        top, left = (int(stream.integers(0, length - side)) for length in source.shape[:2])
        file = io.BytesIO()
        Image.fromarray(source[top : top + side, left : left + side]).save(file, "JPEG", quality=quality)
        photos.append(file.getvalue())
    return photos
