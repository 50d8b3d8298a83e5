"""Numbers of a JSON body as a tensor."""

import numpy as np
from numpy.typing import NDArray

from serve.errors import TensorError


def to_tensor(numbers: list[object]) -> NDArray[np.float32]:
    """Make a float tensor of nested lists of numbers.

    Returns:
        The tensor, in whatever shape the lists have. A number beyond float32 is infinite here.

    Raises:
        TensorError: If the lists are ragged, or hold something else than numbers.
    """
    try:
        array = np.array(numbers)
    except (ValueError, OverflowError) as error:
        raise TensorError("the tensor is ragged, or nested too deeply") from error
    if array.dtype.kind not in "fiu" or _holds_bool(numbers):
        raise TensorError("the tensor holds something else than numbers, or whole ones of more than 64 bits")
    with np.errstate(over="ignore"):
        return array.astype(np.float32)


def _holds_bool(numbers: list[object]) -> bool:
    """Look for a true or false, which numpy would take for 1 and 0 among numbers."""
    if numbers and isinstance(numbers[0], list):
        return any(isinstance(row, list) and _holds_bool(row) for row in numbers)
    return bool in set(map(type, numbers))
