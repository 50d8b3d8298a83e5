from pathlib import Path

import pytest

from zoo.files.durable import new_directory


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
