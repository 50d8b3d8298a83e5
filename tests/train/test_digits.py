from collections import Counter

import numpy as np
import pytest
from sklearn.datasets import load_digits

from train.digits import read_digits
from train.errors import DataError


@pytest.fixture(scope="module")
def split():
    return read_digits()


def test_digits_hold_out_a_stratified_fifth(split):
    assert (len(split.train), len(split.val)) == (1437, 360)
    assert split.class_names == tuple("0123456789")
    assert set(split.train.names).isdisjoint(split.val.names)
    assert min(Counter(split.val.labels).values()) >= 35


def test_split_is_the_same_each_time_and_another_for_another_seed(split):
    assert read_digits().val == split.val
    assert read_digits(split_seed=1).val.names != split.val.names


def test_pixels_are_scikit_learns_scaled_to_255(split):
    index = int(split.val.names[0].removesuffix(".png"))
    expected = np.rint(load_digits().images[index] * (255 / 16))
    pixels = np.asarray(split.val.decode(0))
    assert pixels.shape == (8, 8, 3)
    for channel in range(3):
        np.testing.assert_array_equal(pixels[..., channel], expected)
    assert load_digits().target[index] == split.val.labels[0]


def test_fraction_too_small_for_ten_classes_is_refused():
    with pytest.raises(DataError, match=r"data\.val_fraction 0\.001 does not split the digits"):
        read_digits(val_fraction=0.001)
