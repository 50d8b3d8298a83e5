"""Fixtures of the training loop's tests."""

import logging
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import mlflow
import pytest
from accelerate.state import AcceleratorState, GradientState

from tests.train.tiny import tiny_config, write_images
from train.config import TrainConfig


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current directory, and a process in which no Accelerator, run or handler of another test is left."""
    monkeypatch.chdir(tmp_path)
    handlers, level = logging.root.handlers[:], logging.root.level
    on_term, uri = signal.getsignal(signal.SIGTERM), mlflow.get_tracking_uri()
    _forget()
    yield tmp_path
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
    signal.signal(signal.SIGTERM, on_term)
    while mlflow.active_run():
        mlflow.end_run("FAILED")
    mlflow.set_tracking_uri(uri)
    _forget()


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SQLite store without runs: MLflow takes seconds to make one."""
    file = tmp_path_factory.mktemp("store") / "mlflow.db"
    before = mlflow.get_tracking_uri()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # MLflow's own use of SQLAlchemy
        mlflow.MlflowClient(f"sqlite:///{file}").search_experiments()
    mlflow.set_tracking_uri(before)
    return file


@pytest.fixture
def tiny(here: Path) -> Callable[..., TrainConfig]:
    """`tiny(section__field=value, ...)` gives the tiny training's config, in an empty current directory."""
    write_images(here / "images")

    def configure(**fields: object) -> TrainConfig:
        return tiny_config(here / "images", **fields)

    return configure


@pytest.fixture
def tracked(here: Path, tiny: Callable[..., TrainConfig], empty_store: Path) -> Callable[..., TrainConfig]:
    """The same with a store that holds no run yet."""
    shutil.copy(empty_store, here / "mlflow.db")
    return tiny


def _forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
