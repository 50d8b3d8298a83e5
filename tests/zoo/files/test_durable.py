import os
import shutil
from pathlib import Path

import pytest

from zoo.files.durable import clear_partial, new_directory, remove_directory


def test_a_directory_appears_whole_with_its_parents(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "bundle"
    with new_directory(path) as aside:
        (aside / "a").write_text("1")
        assert not path.exists()
    assert (path / "a").read_text() == "1"
    assert [entry.name for entry in path.parent.iterdir()] == ["bundle"]


def write(path: Path, fault: BaseException | None = None) -> None:
    with new_directory(path) as aside:
        (aside / "a").write_text("ours")
        if fault:
            raise fault


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="disk full"):
        write(tmp_path / "bundle", OSError("disk full"))
    assert not list(tmp_path.iterdir())


def test_an_existing_directory_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    with pytest.raises(FileExistsError, match="bundle: exists already"):
        write(tmp_path / "bundle")
    assert not list((tmp_path / "bundle").iterdir())


def test_a_directory_made_meanwhile_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bundle"
    rename = Path.rename

    def make_it_first(self: Path, target: Path) -> Path:
        target.mkdir()
        (target / "a").write_text("theirs")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", make_it_first)
    with pytest.raises(OSError, match="bundle"):
        write(path)
    assert (path / "a").read_text() == "theirs"


class KilledError(BaseException):
    """Stands for SIGKILL: what comes after it in the same process must not clean up."""


def die(*_args: object, **_options: object) -> None:
    raise KilledError


def killed_while(path: Path, monkeypatch: pytest.MonkeyPatch, *, removing: bool) -> None:
    """Leave what a process leaves that is killed while it writes, or removes, a directory."""
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", die)
        with pytest.raises(KilledError):
            remove_directory(path) if removing else write(path, KilledError())


@pytest.mark.parametrize("removing", [False, True])
def test_a_killed_process_leaves_nothing_but_what_is_hidden_and_can_be_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removing: bool
) -> None:
    write(tmp_path / "other")
    if removing:
        write(tmp_path / "bundle")
    killed_while(tmp_path / "bundle", monkeypatch, removing=removing)
    assert {path.name for path in tmp_path.glob("[!.]*")} == {"other"}
    (left,) = tmp_path.glob(".*")
    assert left.name.startswith(".bundle.partial-")
    clear_partial(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_a_process_with_the_number_of_a_killed_one_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 7)  # as in a container, time after time
    killed_while(tmp_path / "bundle", monkeypatch, removing=False)
    write(tmp_path / "bundle")
    assert (tmp_path / "bundle" / "a").read_text() == "ours"


def test_clearing_a_folder_that_is_not_there_is_nothing(tmp_path: Path) -> None:
    clear_partial(tmp_path / "none")
