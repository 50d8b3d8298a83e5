import os
from pathlib import Path

import pytest

from train.saving.checkpoint import find_newest
from train.saving.latest import is_latest, point_latest


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        (tmp_path / name / "bundle").mkdir(parents=True)
    return tmp_path


def test_the_link_follows_the_run_that_was_published_last(runs: Path) -> None:
    for name in ("a", "b", "b"):
        point_latest(runs / name)
        assert (runs / "latest").resolve() == runs / name
        assert (runs / "latest" / "bundle").is_dir()
    assert sorted(path.name for path in runs.iterdir()) == ["a", "b", "latest"]
    assert [path.name for path in runs.iterdir() if is_latest(path)] == ["latest"]


def test_the_link_still_holds_when_the_folder_is_moved(runs: Path, tmp_path: Path) -> None:
    point_latest(runs / "a")
    moved = tmp_path.parent / "moved"
    runs.rename(moved)
    assert (moved / "latest").resolve() == moved / "a"


def test_a_folder_of_that_name_is_somebodys_own(runs: Path, caplog: pytest.LogCaptureFixture) -> None:
    (runs / "latest").mkdir()
    point_latest(runs / "a")
    assert not (runs / "latest").is_symlink()
    assert "latest is no link, so it stays" in caplog.text
    assert not is_latest(runs / "latest")


def test_a_file_system_without_links_is_said_and_harms_nothing(
    runs: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", refuse)
    point_latest(runs / "a")
    assert "cannot be linked" in caplog.text
    assert sorted(path.name for path in runs.iterdir()) == ["a", "b"]


def test_a_checkpoint_is_found_under_its_own_runs_name(runs: Path, caplog: pytest.LogCaptureFixture) -> None:
    (runs / "a" / "checkpoints" / "step-00000001").mkdir(parents=True)  # not whole: named when it is skipped
    point_latest(runs / "a")
    assert find_newest(runs) is None
    assert caplog.text.count("not whole") == 1
    assert "latest" not in caplog.text
