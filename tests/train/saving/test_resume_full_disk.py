"""A disk that is full while a run saves."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.train.tiny import build_tiny, tiny_config, write_images
from train.errors import CheckpointError
from train.run import Run
from train.saving.checkpoint import find_whole, read_state
from train.saving.resume import save_checkpoint
from train.step import train_step

pytestmark = pytest.mark.slow


def step(run: Run) -> None:
    train_step(run, next(run.batches()))


def save_on_a_full_disk(accelerator, root: str, disk: str) -> list[str]:
    """Save; then save again with ever more room on the disk, until it is enough."""
    run = build_tiny(tiny_config(root, output_dir=disk, checkpoint__keep=9))
    step(run)
    save_checkpoint(run)
    step(run)
    filler, said = Path(disk) / "filler", list[str]()
    for room in range(0, 1 << 20, 8192):
        if accelerator.is_main_process:
            fill(filler, room)
        try:
            save_checkpoint(run)
        except CheckpointError as error:
            said.append(str(error))
            if accelerator.is_main_process:
                assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000001"]
                read_state(run.checkpoints / "step-00000001")
            continue
        break
    if accelerator.is_main_process:
        assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-00000001", "step-00000002"]
        assert find_whole(Path(disk) / "tiny").state.step == 2
    return said


def fill(file: Path, room: int) -> None:
    """Fill the disk but for `room` bytes."""
    file.unlink(missing_ok=True)
    left = os.statvfs(file.parent)
    file.write_bytes(bytes(max(0, left.f_bavail * left.f_frsize - room)))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of a megabyte; skips where none may be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"may not mount: {mounted.stderr}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_full_disk_is_one_error_on_all_ranks_with_the_older_checkpoint_whole_and_no_litter(
    run_ranks, tmp_path, small_disk
):
    root = str(write_images(tmp_path / "images"))
    first, second = run_ranks(save_on_a_full_disk, root=root, disk=str(small_disk))
    assert not first.error, first.traceback
    assert not second.error, second.traceback
    assert first.value == second.value
    assert len(first.value) > 5
    for said in first.value:
        assert "step-00000002: cannot be written (" in said
        assert "No space left on device" in said
        assert "the checkpoints before it are untouched" in said
