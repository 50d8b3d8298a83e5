"""Whatever ends a training, on whichever rank: told once, marked, nothing left over, and `--resume auto` goes on."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.end_to_end.chain import make_store
from tests.end_to_end.faults import STEPS, End, Fault, Folder, find_marked, kill_all, wait_for_end
from train.faults.lock import mark_abandoned

pytestmark = pytest.mark.slow
SEEN_S = 8
STILL = ("--watch.timeout_s", str(SEEN_S))
SILENT = ("--watch.silence_s", str(SEEN_S))
WORKER = ("--data.num_workers", "1")
FORWARD = r"step \d+: forward"
IMAGES = r"after step \d+: waiting for images"
GONE = r"rank {} \(pid \d+ on \S+\) (is gone|has closed its connections), last at " + FORWARD
HUNG = r"rank {} \(pid \d+ on \S+\) did not get on for \d+ s at {}, and the other ranks wait: rank {} in .*{}"
QUIET = r"rank {} \(pid \d+ on \S+\) (gave no sign of life for \d+ s|could not be reached for \d+ s), last at "
SAVED = rf"{{}} after step \d+ of {STEPS}"

FIRST = (
    Fault("rank 1 raises", "raise:1", rf"rank 1, {FORWARD}: ValueError: planned", raised=True),
    Fault("rank 1 loses an image", "lose:1", rf"rank 1, {IMAGES}: \S+\.png: cannot be read \(No such file"),
    Fault("rank 0 is killed", "kill:0", GONE.format(0), flags=WORKER),
    Fault("rank 1 crashes (SIGSEGV)", "segv:1", GONE.format(1)),
    Fault("rank 1 is stopped (SIGSTOP)", "stop:1", QUIET.format(1) + FORWARD, seen_s=SEEN_S, flags=SILENT),
    Fault("rank 1 hangs", "hang:1", HUNG.format(1, FORWARD, 1, "<lambda>"), seen_s=SEEN_S, flags=STILL),
    Fault("rank 1 waits for its disk", "stall:1", HUNG.format(1, IMAGES, 1, "read"), seen_s=SEEN_S, flags=STILL),
    Fault("Ctrl-C", "launcher-int:1", SAVED.format(r"Ctrl-C \(SIGINT\)"), "KILLED", flags=WORKER),
    Fault("all are killed", "kill-all:1", status="RUNNING", flags=WORKER),
)
SECOND = (
    Fault("rank 0 raises", "raise:0", rf"rank 0, {FORWARD}: ValueError: planned", raised=True),
    Fault("rank 1 is killed", "kill:1", GONE.format(1), flags=WORKER),
    Fault("rank 0 is stopped (SIGSTOP)", "stop:0", QUIET.format(0) + FORWARD, seen_s=SEEN_S, flags=SILENT),
    Fault("rank 0 hangs", "hang:0", HUNG.format(0, FORWARD, 0, "<lambda>"), seen_s=SEEN_S, flags=STILL),
    Fault("rank 1 holds its interpreter", "hold:1", QUIET.format(1) + FORWARD, seen_s=SEEN_S, flags=SILENT),
    Fault("SIGTERM", "launcher-term:1", SAVED.format("SIGTERM"), "KILLED", flags=WORKER),
    Fault("SIGHUP", "launcher-hup:1", SAVED.format(r"a closed terminal \(SIGHUP\)"), "KILLED"),
    Fault("the launcher is killed", "launcher-kill:1", SAVED.format("the launcher is gone"), "KILLED", flags=WORKER),
)
FULL = Fault("full disk", "fill:0", r"\S+/step-\d+: cannot be written \(.*\); the checkpoints before it are untouched")
FULL_TOO = Fault("full disk, the store's too", "fill:0", FULL.told, status="RUNNING")
FINISH = Fault("to the end", "", status="FINISHED")
ALL = (*FIRST, *SECOND, FULL, FULL_TOO)
Ends = dict[str, tuple[End, End]]


class Alive(NamedTuple):
    """A training under way, and the terminal that it is in."""

    folder: Folder
    process: "subprocess.Popen[bytes]"
    mark: str
    terminal: int


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store without a run."""
    return make_store(tmp_path_factory.mktemp("store") / "empty.db")


@pytest.fixture(scope="module")
def ends(empty: Path, shell: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ends]:
    """All faults, one after the other in two folders at a time: the end of each, and how the folder was before it."""
    base = tmp_path_factory.mktemp("faults")
    with ThreadPoolExecutor(2) as pool:
        chains = [
            pool.submit(go_through, Folder(base / name, shell).prepare(empty), faults, full, empty)
            for name, faults, full in (("first", FIRST, FULL), ("second", SECOND, FULL_TOO))
        ]
        found = chains[0].result() | chains[1].result()
    yield found
    print(f"\n{'fault':32}{'seconds to the end':24}told")  # noqa: T201  (the table, with -s)
    for fault in ALL:
        end = found[fault.name][0] if fault.name in found else None
        if end is not None and end.seconds is not None:
            seconds = f"{end.seconds:.1f}, seen after {fault.seen_s:.0f}"
            print(f"{fault.name:32}{seconds:24}{' | '.join(end.told)[:220]}")  # noqa: T201


def go_through(folder: Folder, faults: tuple[Fault, ...], full: Fault, empty: Path) -> Ends:
    """Fail as planned again and again, each time going on from the last; then to the end, and onto a full disk."""
    found: Ends = {}
    for fault in (*faults, FINISH):
        before = folder.look()
        found[fault.name if fault.plan else faults[0].name + FINISH.name] = (
            folder.launch(*fault.flags, plan=fault.plan),
            before,
        )
    with small_disk(folder.path / "disk") as disk:
        if disk is not None:
            store = "../disk/mlflow.db" if full is FULL_TOO else "mlflow.db"
            other = Folder(folder.path / "other", folder.shell, output="../disk/runs", store=store).prepare(empty)
            before = other.look()
            found[full.name] = other.launch(plan=full.plan, FAULT_DISK=str(disk)), before
            (disk / "filler").unlink(missing_ok=True)
            mark_abandoned(disk / "runs" / "tiny", f"sqlite:///{other.path / store}")
            found[full.name + FINISH.name] = other.look(), before
    return found


@contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """Mount a disk of 8 MB, where root may; None elsewhere."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(folder)], capture_output=True, check=False
    )
    try:
        yield folder if mounted.returncode == 0 else None
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def end_of(ends: Ends, fault: Fault) -> tuple[End, End]:
    """Return how a fault ended, and how the folder was before; skip where there could be no such fault."""
    if fault.name not in ends:
        pytest.skip("a disk of its own can only be mounted by root")
    return ends[fault.name]


@pytest.mark.parametrize("fault", ALL, ids=lambda fault: fault.name)
def test_fault_is_told_once_with_rank_and_place_before_anything_else(ends: Ends, fault: Fault) -> None:
    end, _ = end_of(ends, fault)
    if not fault.told:
        assert end.told == [], end.text
        return
    (told,) = end.told or [end.text]
    assert re.match(f"{'stopped' if fault.status == 'KILLED' else 'error'}: {fault.told}", told), end.text
    assert "; the last good checkpoint is runs/tiny" in told or "before the first" in told or fault in (FULL, FULL_TOO)
    assert told.endswith("--resume auto goes on from there"), told
    above = end.alarming_before(told)
    if fault.raised:
        assert above[0] == "Traceback (most recent call last):", end.text
        assert above[-1] == "ValueError: planned", end.text
    elif fault is FULL_TOO:
        assert all("metrics wait for the tracking store" in line for line in above), end.text
    else:
        assert above == [], end.text


@pytest.mark.parametrize("fault", ALL, ids=lambda fault: fault.name)
def test_all_ranks_end_with_a_status_and_leave_no_process(ends: Ends, fault: Fault) -> None:
    end, _ = end_of(ends, fault)
    assert end.status != 0, end.text
    assert end.left == ()
    assert end.seconds is not None, end.text
    assert "forcefully exiting" not in end.text, "the launcher's SIGKILL, 30 s after the first rank has left"


@pytest.mark.parametrize("fault", ALL, ids=lambda fault: fault.name)
def test_run_is_marked_with_the_reason(ends: Ends, fault: Fault) -> None:
    end, before = end_of(ends, fault)
    assert end.run_status == fault.status, end.text
    assert len(end.tags) == len(before.tags) + (fault.status != "RUNNING")
    if fault.status != "RUNNING":
        assert re.match(fault.told, end.tags["failure"])
        assert end.tags["failure"] in end.told[0]


@pytest.mark.parametrize("fault", ALL, ids=lambda fault: fault.name)
def test_last_checkpoint_is_whole_and_later_than_the_one_before(ends: Ends, fault: Fault) -> None:
    """So each launch has gone on from where the fault before it left the run."""
    end, before = end_of(ends, fault)
    assert before.step < end.step < STEPS, end.text


@pytest.mark.parametrize("faults", [FIRST, SECOND], ids=["first", "second"])
def test_run_goes_on_to_its_end_after_all_of_them(ends: Ends, faults: tuple[Fault, ...]) -> None:
    end, before = ends[faults[0].name + FINISH.name]
    assert (end.status, end.run_status, end.step, end.told) == (0, "FINISHED", STEPS, []), end.text
    assert end.seconds is None
    assert end.left == ()
    assert sorted(end.tags) == sorted(f"failure.{number + 1}" for number in range(len(faults)))
    assert set(before.tags.values()) <= set(end.tags.values())


def test_run_that_nobody_could_mark_is_marked_by_the_next_start(ends: Ends) -> None:
    end, _ = ends[FIRST[0].name + FINISH.name]
    (reason,) = [reason for reason in end.tags.values() if "ended without a word" in reason]
    assert re.match(r"process \d+ on \S+ \(since .*\) ended without a word: killed, or its machine went down", reason)
    assert "is marked FAILED now" in end.text


def test_run_whose_store_was_on_the_full_disk_too_is_marked_once_there_is_room(ends: Ends) -> None:
    end_of(ends, FULL_TOO)
    end, _ = ends[FULL_TOO.name + FINISH.name]
    assert end.run_status == "FAILED"
    assert "ended without a word" in end.tags["failure"]


@pytest.fixture
def alive(empty: Path, shell: dict[str, str], tmp_path: Path) -> Iterator[Alive]:
    """A training that goes on slowly, in one process in a terminal."""
    folder = Folder(tmp_path / "alive", shell).prepare(empty)
    theirs, mine = os.openpty()
    process, mark, _ = folder.start(plan="slow:0", ranks=1, terminal=mine)
    os.close(mine)
    try:
        deadline = time.monotonic() + 90
        while not (folder.path / "fault").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield Alive(folder, process, mark, theirs)
    finally:
        kill_all(mark)
        process.wait()


def test_second_training_of_the_same_run_is_refused_and_a_closed_terminal_ends_the_first(alive: Alive) -> None:
    second = alive.folder.launch(ranks=1)
    assert second.status == 2, second.text
    (told,) = second.told
    assert re.match(rf"error: runs/tiny/\w+: process {alive.process.pid} on \S+ \(since .*\) trains in it; wait", told)
    assert second.alarming_before(told) == []
    assert alive.process.poll() is None

    os.close(alive.terminal)
    alive.process.send_signal(signal.SIGHUP)  # as the system does; from now on it can print nothing
    assert alive.process.wait(120) == 1
    wait_for_end(alive.mark, 10)
    assert find_marked(alive.mark) == {}
    end = alive.folder.look()
    assert end.run_status == "KILLED"
    assert re.match(r"a closed terminal \(SIGHUP\) after step \d+ of ", end.tags["failure"])
    assert end.tags["failure"].startswith(f"a closed terminal (SIGHUP) after step {end.step} of ")


def test_mistake_of_all_ranks_is_one_line(empty: Path, shell: dict[str, str], tmp_path: Path) -> None:
    end = Folder(tmp_path / "mistake", shell).prepare(empty).launch("--freeze", "['*']")
    assert end.status == 1, "the launcher's; its table has the ranks'"
    (told,) = end.told
    assert told.startswith("error: no trainable parameters: all ")
    assert end.alarming_before(told) == []
    assert re.search(r"exitcode\s*: 2 ", end.text), end.text
    assert (end.run_status, end.step, end.left) == ("", -1, ())
