import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import mlflow
import pytest
from mlflow.exceptions import MlflowException

from train.config import TrainConfig
from train.errors import CheckpointError
from train.faults import lock
from train.faults.lock import mark_abandoned, occupied
from train.faults.marking import find_status

# MLflow's own, not ours to mend
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
HOLD = """
import sys
from pathlib import Path
from train.faults.lock import occupied
with occupied(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def held_by_another(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """Let another process hold a folder while the block runs; it lets go as a training does at its end."""
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", HOLD, str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.stdin.close()
        process.wait()


@pytest.fixture
def store(tracked: Callable[..., TrainConfig]) -> mlflow.MlflowClient:
    return mlflow.MlflowClient(tracked().tracking.uri)


def start_run(client: mlflow.MlflowClient, run_dir: Path) -> Path:
    """Start an MLflow run and make its folder."""
    experiment = client.get_experiment_by_name("any")
    experiment_id = experiment.experiment_id if experiment else client.create_experiment("any")
    folder = run_dir / client.create_run(experiment_id).info.run_id
    folder.mkdir(parents=True)
    return folder


def abandon(folder: Path) -> None:
    """Leave a folder as a process does that is killed."""
    (folder / ".running.lock").touch()
    note = {"pid": 4711, "host": "node7", "since": "2026-01-02 03:04:05"}
    (folder / "running.json").write_text(json.dumps(note))


def test_folder_is_made_and_says_who_trains_in_it_for_as_long(tmp_path):
    folder = tmp_path / "runs" / "0123"
    with occupied(folder):
        assert json.loads((folder / "running.json").read_text())["pid"] == os.getpid()
    assert [path.name for path in folder.iterdir() if path.suffix != ".lock"] == []
    with occupied(folder):
        """Free again."""


def test_note_stays_after_an_error_until_the_run_is_known_to_be_marked(tmp_path):
    with pytest.raises(ValueError, match="planned"), occupied(tmp_path):
        raise ValueError("planned")
    assert (tmp_path / "running.json").exists()
    with occupied(tmp_path):
        """Free again."""


def test_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(CheckpointError, match=r"file/0123: cannot be written \(Not a directory\)"),
        occupied(tmp_path / "file" / "0123"),
    ):
        pytest.fail("cannot be")


def test_full_disk_is_named_and_the_folder_let_go(tmp_path, monkeypatch):
    def write_text(*_args, **_options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", write_text)
        with pytest.raises(CheckpointError, match=r"cannot be written \(No space left on device\)"), occupied(tmp_path):
            pytest.fail("cannot be")
    with occupied(tmp_path):
        """Free again."""


@pytest.mark.slow
def test_second_process_is_refused_with_the_firsts_pid_and_let_in_after_a_sigkill(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_PATIENCE_S", 0.2)
    with held_by_another(tmp_path) as other:
        said = rf"{re.escape(str(tmp_path))}: process {other.pid} on \S+ \(since 20.*\) trains in it; wait for its end"
        with pytest.raises(CheckpointError, match=said), occupied(tmp_path):
            pytest.fail("two train in it")
        other.send_signal(signal.SIGKILL)
        other.wait()
        with occupied(tmp_path):
            assert json.loads((tmp_path / "running.json").read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("note", ["", "{", "[]", '{"pid": 1}', None])
def test_holder_without_a_whole_note_is_another_process(tmp_path, note):
    if note is not None:
        (tmp_path / "running.json").write_text(note)
    assert lock.describe_holder(tmp_path) == "another process"


def test_run_that_ended_without_a_word_is_marked_once(store, here, caplog):
    folder = start_run(store, here / "runs")
    abandon(folder)
    assert mark_abandoned(here / "runs", store.tracking_uri) == [folder.name]
    assert find_status(store.tracking_uri, folder.name) == "FAILED"
    assert store.get_run(folder.name).data.tags["failure"] == (
        "process 4711 on node7 (since 2026-01-02 03:04:05) ended without a word: killed, or its machine went down"
    )
    assert f"run {folder.name} is marked FAILED now: process 4711 on node7" in caplog.text
    assert not (folder / "running.json").exists()
    assert mark_abandoned(here / "runs", store.tracking_uri) == []


def test_run_that_was_marked_keeps_its_reason(store, here):
    folder = start_run(store, here / "runs")
    abandon(folder)
    store.set_tag(folder.name, "failure", "rank 1 is gone")
    store.set_terminated(folder.name, "FAILED")
    assert mark_abandoned(here / "runs", store.tracking_uri) == []
    assert store.get_run(folder.name).data.tags["failure"] == "rank 1 is gone"
    assert not (folder / "running.json").exists()


@pytest.mark.slow
def test_run_that_is_alive_is_left_alone(store, here):
    folder = start_run(store, here / "runs")
    with held_by_another(folder):
        assert mark_abandoned(here / "runs", store.tracking_uri) == []
        assert find_status(store.tracking_uri, folder.name) == "RUNNING"
        assert (folder / "running.json").exists()


def test_run_that_cannot_be_marked_is_left_for_the_next_start(store, here, monkeypatch, caplog):
    folder = start_run(store, here / "runs")
    abandon(folder)
    with monkeypatch.context() as patched:
        patched.setattr(mlflow.MlflowClient, "set_terminated", lambda *_: 1 / 0)
        assert mark_abandoned(here / "runs", store.tracking_uri) == []
    assert "could not be marked FAILED" in caplog.text
    assert mark_abandoned(here / "runs", store.tracking_uri) == [folder.name]


def test_run_in_a_store_that_cannot_be_read_is_left_for_the_next_start(store, here, monkeypatch, caplog):
    def refuse(*_args):
        raise MlflowException("the server is down")

    folder = start_run(store, here / "runs")
    abandon(folder)
    with monkeypatch.context() as patched:
        patched.setattr(mlflow.MlflowClient, "get_run", refuse)
        assert mark_abandoned(here / "runs", store.tracking_uri) == []
    assert f"run {folder.name} is left for the next start to look at: " in caplog.text
    assert "cannot be read: the server is down" in caplog.text
    assert mark_abandoned(here / "runs", store.tracking_uri) == [folder.name]


def test_link_to_the_latest_run_is_no_second_run(store, here):
    folder = start_run(store, here / "runs")
    abandon(folder)
    (here / "runs" / "latest").symlink_to(folder.name)
    assert mark_abandoned(here / "runs", store.tracking_uri) == [folder.name]


def test_first_start_of_all_has_nothing_to_mark(here):
    assert mark_abandoned(here / "runs", f"sqlite:///{here}/none.db") == []
    assert list(here.iterdir()) == []
