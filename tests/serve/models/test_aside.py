import asyncio
import gc
import subprocess
import sys
import threading
import weakref

import pytest

from serve.models.aside import run_aside

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_it_returns_and_raises_as_the_function_does() -> None:
    assert await run_aside(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await run_aside(divmod, 7, 0)


async def test_the_loop_turns_meanwhile_and_whoever_is_cancelled_does_not_wait() -> None:
    gate = threading.Event()
    task = asyncio.create_task(run_aside(gate.wait, 30))
    await asyncio.sleep(0.01)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.set()


def test_the_end_of_the_loop_does_not_wait_for_it() -> None:
    gate, ended = threading.Event(), threading.Event()

    def work() -> None:
        gate.wait(30)
        ended.set()

    async def leave() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(run_aside(work), 0.01)

    asyncio.run(leave())
    assert [thread.daemon for thread in threading.enumerate() if thread.name == "aside"] == [True]  # nor does the exit
    assert not ended.is_set()  # and yet the loop is gone
    gate.set()
    assert ended.wait(30)


async def test_an_error_keeps_nothing_that_was_half_made() -> None:
    class Half:
        pass

    made: list[weakref.ref[Half]] = []

    def fail() -> None:
        half = Half()
        made.append(weakref.ref(half))
        raise ZeroDivisionError

    gc.disable()
    try:
        with pytest.raises(ZeroDivisionError):
            await run_aside(fail)
        for thread in threading.enumerate():
            if thread.name == "aside":
                thread.join(30)
        await asyncio.sleep(0)  # the loop itself holds what it woke us with until we wait again
        assert made[0]() is None
    finally:
        gc.enable()


ENDING = """
import asyncio, atexit, sys, threading
from serve.models.aside import end_process, run_aside

atexit.register(print, "taken down")

async def leave():
    try:
        await asyncio.wait_for(run_aside(threading.Event().wait, float(sys.argv[1])), float(sys.argv[2]))
    except TimeoutError:
        pass
    else:
        [thread.join() for thread in threading.enumerate() if thread.name == "aside"]

asyncio.run(leave())
print("done", end=" ")
end_process(3)
"""


@pytest.mark.parametrize(
    ("wait_s", "timeout_s", "printed"), [("0", "30", "done taken down\n"), ("60", "0.05", "done ")]
)
def test_the_process_ends_with_its_status_and_not_under_a_thread_that_is_left(
    wait_s: str, timeout_s: str, printed: str
) -> None:
    command = [sys.executable, "-c", ENDING, wait_s, timeout_s]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, printed, "")
