"""How much memory images take at a time, and that it is given back."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from serve.operations.memory import LARGE_PIXELS, DecodeRoom, give_back_memory, trim_memory

ROOT = Path(__file__).parent.parent.parent.parent


def test_large_images_are_decoded_one_at_a_time_and_small_ones_beside_them() -> None:
    room, entered = DecodeRoom(), threading.Event()

    def decode(pixels: int) -> threading.Thread:
        def work() -> None:
            with room(pixels):
                entered.set()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread

    with room(LARGE_PIXELS + 1):
        decode(LARGE_PIXELS).join(30)
        assert entered.is_set()
        entered.clear()
        waiting = decode(LARGE_PIXELS + 1)
        assert not entered.wait(0.2)
    waiting.join(30)
    assert entered.is_set()


PROGRAM = """
import sys, threading
import numpy as np
import psutil
from serve.operations.memory import give_back_memory

if sys.argv[1] == "set":
    assert give_back_memory()

def work():
    for _ in range(2):  # what glibc learns from a block that is freed, it does at the next ones
        blocks = [np.ones(16 * 1024 * 1024, np.uint8) for _ in range(6)]
        keep.append(np.ones(1000))
        del blocks

keep = []
threads = [threading.Thread(target=work) for _ in range(4)]
start = psutil.Process().memory_info().rss
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print((psutil.Process().memory_info().rss - start) / 1e6)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the C library of Linux")
def test_blocks_that_are_free_go_back_to_the_system() -> None:
    def grown(how: str) -> float:
        command = [sys.executable, "-c", PROGRAM, how]
        return float(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)

    assert grown("set") < 16
    assert grown("left") > 30, "without it something is kept: else this test shows nothing"


def test_another_allocator_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _name: object())
    assert give_back_memory() is False
    trim_memory()


TRIMMED = """
import psutil
from serve.operations.memory import trim_memory

blocks = [bytes(50_000) for _ in range(4000)]
del blocks[:-1]  # the last one stands at the end of the heap: what is free before it stays
before = psutil.Process().memory_info().rss
trim_memory()
print((before - psutil.Process().memory_info().rss) / 1e6)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the C library of Linux")
def test_what_is_free_in_the_heap_goes_back_when_told() -> None:
    command = [sys.executable, "-c", TRIMMED]
    assert float(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout) > 100
