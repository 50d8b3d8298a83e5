"""Whether all ranks have made the same digest: one small collective, which no rank skips, failed or not.

And the one error of all ranks where they have not.
"""

from collections.abc import Callable
from typing import NoReturn

import torch
import xxhash
from accelerate import Accelerator

from train.ranks import together

_EMPTY = xxhash.xxh3_128_digest(b"")


def made_alike(make: Callable[[], bytes], accelerator: Accelerator, what: str) -> bool:
    """Say whether `make` returns the same digest on every rank; every rank calls it, and all get the same answer.

    One gather of a row of 17 bytes: whether the digest could be made, and the digest.

    Args:
        make: Makes this rank's digest, an xxh3_128 of 16 bytes; it may fail, but holds no collective.
        accelerator: The world.
        what: The check in a few words, for the message.

    Raises:
        Exception: What `make` raised on any rank; on every rank, as `together` does.
    """
    failure: Exception | None = None
    digest = _EMPTY
    try:
        digest = make()
    except Exception as error:  # every kind: the other ranks wait for this one's row
        failure = error
    row = torch.frombuffer(bytearray((failure is None, *digest)), dtype=torch.uint8)[None]
    rows = accelerator.gather(row.to(accelerator.device)).cpu()  # (world_size, 17)
    if not bool(rows[:, 0].all()):
        with together(accelerator, what):
            if failure is not None:
                raise failure
    return bool((rows == rows[:1]).all())


def raise_alike(error: Exception, accelerator: Accelerator, what: str) -> NoReturn:
    """Raise an error that every rank has found alike, marked as such: none has to say that it was the first.

    Args:
        error: The same kind and message on every rank.
        accelerator: The world; every rank calls it.
        what: The check in a few words.
    """
    try:
        with together(accelerator, what):
            raise error
    except type(error) as shared:
        raise shared from None  # it says all that its cause does
    raise AssertionError("together lets no error through")
