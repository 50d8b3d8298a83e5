import logging
import time
from collections.abc import Callable
from pathlib import Path

import mlflow
import pytest

from train.config import TrainConfig
from train.faults import marking
from train.faults.marking import find_status, is_reachable, mark_ended

# MLflow's own, not ours to mend
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")


@pytest.fixture
def run(tracked: Callable[..., TrainConfig]) -> tuple[str, str]:
    """The store's URI and a run that is under way."""
    uri = tracked().tracking.uri
    client = mlflow.MlflowClient(uri)
    return uri, client.create_run(client.create_experiment("any")).info.run_id


@pytest.mark.parametrize("status", ["FAILED", "KILLED"])
def test_run_ends_with_status_and_reason(run, status):
    uri, run_id = run
    assert find_status(uri, run_id) == "RUNNING"
    assert mark_ended(uri, run_id, status, "rank 1 is gone")
    assert find_status(uri, run_id) == status
    assert mlflow.MlflowClient(uri).get_run(run_id).data.tags["failure"] == "rank 1 is gone"


def test_long_reason_is_cut(run):
    uri, run_id = run
    assert mark_ended(uri, run_id, "FAILED", "x" * 9000)
    assert len(mlflow.MlflowClient(uri).get_run(run_id).data.tags["failure"]) == 5000


def test_run_that_the_store_does_not_have_is_a_warning(run, caplog):
    uri, _ = run
    with caplog.at_level(logging.WARNING):
        assert not mark_ended(uri, "0123", "FAILED", "lost")
    assert "the MLflow run 0123 could not be marked FAILED in sqlite:///" in caplog.text
    assert find_status(uri, "0123") is None


def test_store_that_has_gone_is_a_warning_and_no_empty_one_is_made(here, caplog):
    with caplog.at_level(logging.WARNING):
        assert not mark_ended(f"sqlite:///{here}/gone.db", "0123", "FAILED", "lost")
    assert "could not be marked FAILED" in caplog.text
    assert f"no file {here}/gone.db" in caplog.text
    assert list(here.iterdir()) == []


def test_store_that_does_not_answer_is_waited_for_only_so_long(monkeypatch, caplog):
    monkeypatch.setattr(marking, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(marking, "_write", lambda *_: time.sleep(60))
    with caplog.at_level(logging.WARNING):
        assert not mark_ended("http://user:secret@host", "0123", "KILLED", "SIGTERM")
    assert "could not be marked KILLED in http://host: no answer in 0.1 s" in caplog.text


@pytest.mark.parametrize(
    ("uri", "same_machine", "expected"),
    [
        ("sqlite:///mlflow.db", True, True),
        ("sqlite:///mlflow.db", False, False),
        ("http://host:5000", False, True),
        ("postgresql://host/mlflow", False, True),
    ],
)
def test_store_in_a_file_is_reached_on_its_machine_alone(uri, same_machine, expected):
    assert is_reachable(uri, same_machine=same_machine) is expected


def test_looking_for_a_status_makes_no_store(here: Path):
    assert find_status(f"sqlite:///{here}/gone.db", "0123") is None
    assert list(here.iterdir()) == []
