import numpy as np
import pytest

from serve.errors import MalformedError, TensorError, TooLargeError
from serve.protocol.payload import check_count, to_images
from zoo.card import Preprocessing
from zoo.errors import ImageError
from zoo.preprocess import ImageLimits, preprocess

HOW = Preprocessing(size=(32, 24), mean=(0.5, 0.4, 0.3), std=(0.5, 0.4, 0.3))
LIMITS = ImageLimits(max_pixels=10_000)


def test_images_become_the_models_input_bit_for_bit(images: list[bytes]) -> None:
    got = to_images(images, HOW, LIMITS)
    assert got.shape == (3, 3, 32, 24)
    assert got.dtype == np.float32
    assert np.array_equal(got, np.stack([preprocess(image, HOW) for image in images]))


def test_a_tensor_is_taken_as_it_is() -> None:
    tensor = np.random.default_rng(0).standard_normal((2, 3, 32, 24), dtype=np.float32)
    assert to_images(tensor, HOW, LIMITS) is tensor


@pytest.mark.parametrize("shape", [(3, 32, 24), (1, 3, 24, 32), (1, 1, 32, 24), (2,), (1, 3, 32, 24, 1), (1, 3, 0, 24)])
def test_a_tensor_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(TensorError, match=r"wanted \(B, 3, 32, 24\)"):
        to_images(np.zeros(shape, np.float32), HOW, LIMITS)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_tensor_that_is_not_finite_is_refused(value: float) -> None:
    tensor = np.zeros((2, 3, 32, 24), np.float32)
    tensor[1, 2, 31, 23] = value
    with pytest.raises(TensorError, match="NaN, or numbers beyond float32"):
        to_images(tensor, HOW, LIMITS)


def test_the_bad_image_is_named_among_several(images: list[bytes]) -> None:
    with pytest.raises(ImageError, match=r"^image 2: not an image"):
        to_images([*images[:2], b"hello"], HOW, LIMITS)
    with pytest.raises(ImageError, match=r"^not an image"):
        to_images([b"hello"], HOW, LIMITS)


def test_images_are_counted() -> None:
    check_count(4, 4)
    with pytest.raises(TooLargeError, match="has 5 images, more than 4"):
        check_count(5, 4)
    with pytest.raises(MalformedError, match="no images"):
        check_count(0, 4)
