"""What `Tracker.check` makes of every kind of URI."""

import socket
from pathlib import Path

import pytest

from train.config import TrackingConfig
from train.errors import TrackingError
from train.store import without_password
from train.tracking import Tracker


def check(uri: str) -> None:
    Tracker(TrackingConfig(uri=uri)).check()


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("uri", ["sqlite:///mlflow.db", "sqlite:///{here}/other.db"])
def test_check_creates_nothing(here, uri):
    check(uri.format(here=here))
    assert everything(here) == []


def test_server_that_cannot_be_reached_is_named_without_its_password(here):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(TrackingError, match=rf"tracking\.uri http://127\.0\.0\.1:{port}: cannot be reached") as caught:
        check(f"http://ann:s3cret@127.0.0.1:{port}")
    assert "s3cret" not in str(caught.value)
    assert everything(here) == []


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("http://localhost:99999", "cannot be reached"),
        ("http://[half", "cannot be reached"),
        ("http://", "cannot be reached"),
        ("sqlite:///none/mlflow.db", "none is no folder that can be written to"),
        ("sqlite:////none/mlflow.db", "/none is no folder that can be written to"),
        ("foo://somewhere", "cannot be used"),
        ("mysql+nothing://u:s3cret@127.0.0.1:1/db", "mysql\\+nothing://127.0.0.1:1/db: cannot be reached"),
        ("oracle://u:s3cret@[half", "cannot be reached"),
    ],
)
def test_store_that_cannot_be_used_is_one_line_and_nothing_written(here, uri, said):
    with pytest.raises(TrackingError, match=said) as caught:
        check(uri)
    assert "\n" not in str(caught.value)
    assert "s3cret" not in str(caught.value)
    assert everything(here) == []


def test_file_that_is_no_database_is_one_line(here):
    (here / "notes.txt").write_text("no database " * 1000)
    with pytest.raises(TrackingError, match=r"tracking\.uri sqlite:///notes\.txt: .*not a database") as caught:
        check("sqlite:///notes.txt")
    assert "\n" not in str(caught.value)
    (here / "folder").mkdir()
    with pytest.raises(TrackingError, match=r"sqlite:///folder: folder is a folder"):
        check("sqlite:///folder")


def test_folder_of_files_is_refused_as_mlflow_does(here):
    with pytest.raises(TrackingError, match=r"tracking\.uri mlruns: cannot be used: .*sqlite:///mlflow\.db"):
        check("mlruns")
    assert everything(here) == []


@pytest.mark.parametrize(
    ("uri", "bare"),
    [
        ("https://ann:p@ss@host:5000/x@y", "https://host:5000/x@y"),
        ("sqlite:///mlflow.db", "sqlite:///mlflow.db"),
        ("mlruns", "mlruns"),
    ],
)
def test_password_is_left_out(uri, bare):
    assert without_password(uri) == bare
