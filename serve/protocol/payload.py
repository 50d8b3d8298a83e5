"""What a request asks of a model, whatever protocol it speaks, and the way from there to the model's input."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serve.errors import MalformedError, TensorError, TooLargeError
from serve.protocol.schemas import DEFAULT_TOP_K
from zoo.card import Preprocessing
from zoo.errors import ImageError
from zoo.preprocess import ImageLimits, preprocess


@dataclass(frozen=True)
class Payload:
    """What a request asks: encoded images or a tensor, and how many classes to name for each.

    Attributes:
        images: Image files, or the model's input itself, (B, 3, height, width).
        top_k: How many classes to list for each image.
    """

    images: Sequence[bytes] | NDArray[np.float32]
    top_k: int = DEFAULT_TOP_K


def check_count(count: int, max_images: int) -> None:
    """Check the number of images of a request, before any is decoded.

    Raises:
        MalformedError: If there are none.
        TooLargeError: If there are more than `max_images`.
    """
    if count == 0:
        raise MalformedError("the request has no images")
    if count > max_images:
        raise TooLargeError(f"the request has {count} images, more than {max_images}")


def to_images(
    images: Sequence[bytes] | NDArray[np.float32], preprocessing: Preprocessing, limits: ImageLimits
) -> NDArray[np.float32]:
    """Decode and transform every image, or check the tensor.

    Returns:
        The model's input, (B, 3, height, width).

    Raises:
        ImageError: If an image cannot be decoded within the limits; with several, the message counts from 0.
        TensorError: If the tensor has another shape, or is not finite.
    """
    wanted = (3, *preprocessing.size)
    if isinstance(images, np.ndarray):
        if images.shape[1:] != wanted:
            got = ", ".join(map(str, images.shape))
            raise TensorError(f"the tensor has shape ({got}), wanted (B, {', '.join(map(str, wanted))})")
        if not np.isfinite(images).all():
            raise TensorError("the tensor holds NaN, or numbers beyond float32")
        return images
    if len(images) == 1:
        return preprocess(images[0], preprocessing, limits)[None]  # without a copy
    inputs = np.empty((len(images), *wanted), np.float32)
    for i, data in enumerate(images):
        try:
            inputs[i] = preprocess(data, preprocessing, limits)
        except ImageError as error:
            raise name_image(error, i, len(images)) from error
    return inputs


def name_image(error: ImageError, index: int, count: int) -> ImageError:
    """Say which of several images an error is about, counting from 0."""
    return error if count == 1 else ImageError(f"image {index}: {error}")
