import traceback

import pytest
import xxhash
from accelerate import Accelerator

from train.equality.digests import made_alike, raise_alike
from train.errors import ReplicaMismatch
from train.ranks import is_shared


def compare(accelerator: Accelerator) -> list[object]:
    """Equal, then different, then failing on the last rank, then equal again: no rank has lost its place."""
    rank = accelerator.process_index
    heard: list[object] = []

    def fail() -> bytes:
        if rank:
            raise ZeroDivisionError("planted")
        return xxhash.xxh3_128_digest(b"")

    for make in (lambda: xxhash.xxh3_128_digest(b"a"), lambda: xxhash.xxh3_128_digest(bytes([rank])), fail):
        try:
            heard.append(made_alike(make, accelerator, "test"))
        except ZeroDivisionError as error:
            heard.append(str(error))
    heard.append(made_alike(lambda: xxhash.xxh3_128_digest(b"b"), accelerator, "test"))
    message = " ".join(["they", "differ"])  # nowhere in the source, which a traceback quotes
    try:
        raise_alike(ReplicaMismatch(message), accelerator, "test")
    except ReplicaMismatch as error:
        told = "".join(traceback.format_exception(error))
        heard += [str(error), is_shared(error), told.count(message)]
    return heard


@pytest.mark.slow
def test_all_ranks_get_the_same_answer_and_the_error_of_any(run_ranks) -> None:
    first, second = run_ranks(compare)
    assert not first.error, first.traceback
    assert first.value[:2] == second.value[:2] == [True, False]
    assert first.value[2] == second.value[2] == "planted (rank 1 of 2, test)"
    assert first.value[3] is second.value[3] is True
    assert first.value[4:] == second.value[4:] == ["they differ", True, 1]
