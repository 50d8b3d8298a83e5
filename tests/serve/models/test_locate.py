import os
import socket
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow.tracking import MlflowClient

from serve.errors import LocateError
from serve.models.locate import locate_model

pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")


@pytest.fixture
def tracking_uri(monkeypatch: pytest.MonkeyPatch) -> object:
    """Sets MLflow's tracking URI for one test."""
    before = mlflow.get_tracking_uri()
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    yield mlflow.set_tracking_uri
    mlflow.set_tracking_uri(before)


@pytest.mark.slow
@pytest.mark.parametrize("uri", ["models:/tiny@champion", "models:/tiny/1"])
def test_alias_and_version_find_the_bundle(registered: str, bundle: Path, tmp_path: Path, uri: str) -> None:
    assert registered == "models:/tiny/1"
    located = locate_model(uri, tmp_path)
    assert (located.name, located.version) == ("tiny", "1")
    assert tmp_path in located.bundle.parents
    contents = {file.name: file.read_bytes() for file in located.bundle.iterdir()}
    assert contents == {file.name: file.read_bytes() for file in bundle.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("models:/tinny@champion", "no registered model 'tinny', did you mean 'tiny'"),
        ("models:/tiny@champoin", "model 'tiny' has no alias 'champoin', did you mean 'champion'"),
        ("models:/tiny/7", "model 'tiny' has no version 7; it has 1"),
    ],
)
def test_what_the_registry_has_not_is_named(registered: str, tmp_path: Path, uri: str, message: str) -> None:
    assert registered
    with pytest.raises(LocateError, match=message) as caught:
        locate_model(uri, tmp_path)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_model_that_is_not_ours_is_refused(registered: str, tmp_path: Path) -> None:
    assert registered
    client = MlflowClient()
    with mlflow.start_run() as run:
        mlflow.log_text("nothing", "model/artifacts/x.txt")
    client.create_registered_model("foreign")
    client.create_model_version("foreign", f"{run.info.artifact_uri}/model", run.info.run_id)
    with pytest.raises(LocateError, match="version 1 holds no bundle of ours"):
        locate_model("models:/foreign/1", tmp_path)


@pytest.mark.slow
def test_a_version_whose_files_are_gone_is_refused(registered: str, tmp_path: Path) -> None:
    assert registered
    client = MlflowClient()
    client.create_registered_model("gone")
    client.create_model_version("gone", str(tmp_path / "nowhere"))
    with pytest.raises(LocateError, match=r"models:/gone/1: cannot be read from sqlite"):
        locate_model("models:/gone/1", tmp_path)


@pytest.mark.slow
def test_an_empty_registry_says_so(tracking_uri: object, tmp_path: Path) -> None:
    tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")  # type: ignore[operator]
    MlflowClient().search_registered_models()  # makes the file
    with pytest.raises(LocateError, match="no registered model 'digits'; the registry is empty, train a model first"):
        locate_model("models:/digits@champion", tmp_path)


def test_no_store_is_made_where_there_is_none(tracking_uri: object, tmp_path: Path) -> None:
    tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")  # type: ignore[operator]
    with pytest.raises(LocateError, match=r"no MLflow store at .*/mlflow\.db; train a model here first"):
        locate_model("models:/digits@champion", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_store_that_is_no_database_is_one_line(tracking_uri: Any, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no database " * 200)
    tracking_uri(f"sqlite:///{tmp_path}/notes.txt")
    with pytest.raises(
        LocateError, match=r"models:/digits@champion: cannot be read from .*file is not a database"
    ) as told:
        locate_model("models:/digits@champion", tmp_path)
    assert "\n" not in str(told.value)


def test_a_server_out_of_reach_is_told_after_one_retry_and_without_its_password(
    tracking_uri: object, tmp_path: Path
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        tracking_uri(f"http://me:SECRET@127.0.0.1:{closed.getsockname()[1]}")  # type: ignore[operator]
        with pytest.raises(LocateError, match=r"no MLflow server answers at http://127\.0\.0\.1:\d+; ") as caught:
            locate_model("models:/digits@champion", tmp_path)
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "1"  # MLflow's own 7 take minutes
    assert "SECRET" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("uri", ["models:/", "models:/x", "models:/x/", "models:/x/latest", "models:/@a", "models:/x@"])
def test_a_uri_of_another_form_is_refused(tmp_path: Path, uri: str) -> None:
    with pytest.raises(LocateError, match="wanted is models:/NAME@ALIAS"):
        locate_model(uri, tmp_path)


def test_a_local_bundle_stays_where_it_is(bundle: Path, tmp_path: Path) -> None:
    located = locate_model(str(bundle), tmp_path)
    assert (located.bundle, located.name, located.version) == (bundle, "tiny", "local")
    with pytest.raises(LocateError, match="no bundle here"):
        locate_model(str(tmp_path), tmp_path)
