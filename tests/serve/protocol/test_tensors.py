import numpy as np
import pytest

from serve.errors import TensorError
from serve.protocol.tensors import to_tensor


def test_lists_of_numbers_become_float32_in_their_shape() -> None:
    tensor = to_tensor([[[0.1, 2], [3, -4e-3]]])
    assert tensor.dtype == np.float32
    assert np.array_equal(tensor, np.float32([[[0.1, 2], [3, -4e-3]]]))


def test_a_number_beyond_float32_is_infinite() -> None:
    assert np.array_equal(to_tensor([1e300, -1e300, 2**63]), np.float32([np.inf, -np.inf, 2**63]))


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([[1.0], [1.0, 2.0]], "ragged"),
        ([[1.0], 2.0], "ragged"),
        ([[1.0], [[2.0]]], "ragged"),
        ([1.0, "2"], "something else than numbers"),
        ([None], "something else than numbers"),
        ([True, False], "something else than numbers"),
        ([1.0, True], "something else than numbers"),
        ([[[1.0, 2.0]], [[1.0, False]]], "something else than numbers"),
        ([{}], "something else than numbers"),
        ([1.0, 10**30], "whole ones of more than 64 bits"),
        ([10**400], "more than 64 bits"),
    ],
)
def test_what_is_no_tensor_is_refused(numbers: list[object], message: str) -> None:
    with pytest.raises(TensorError, match=message):
        to_tensor(numbers)
