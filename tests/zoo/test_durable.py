from pathlib import Path

import pytest

from zoo.durable import new_directory


def test_a_directory_appears_whole_with_its_parents(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "bundle"
    with new_directory(path) as aside:
        (aside / "a").write_text("1")
        assert not path.exists()
    assert (path / "a").read_text() == "1"
    assert [entry.name for entry in path.parent.iterdir()] == ["bundle"]


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="disk full"), new_directory(tmp_path / "bundle") as aside:
        (aside / "a").write_text("1")
        raise OSError("disk full")
    assert not list(tmp_path.iterdir())


def test_an_existing_directory_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    with pytest.raises(FileExistsError, match="bundle: exists already"), new_directory(tmp_path / "bundle"):
        pytest.fail("the block must not run")


def test_a_directory_made_meanwhile_wins(tmp_path: Path) -> None:
    path = tmp_path / "bundle"
    with pytest.raises(OSError, match="bundle"), new_directory(path) as aside:
        (aside / "a").write_text("ours")
        path.mkdir()
        (path / "a").write_text("theirs")
    assert (path / "a").read_text() == "theirs"
