import sys
from collections.abc import Callable

import mlflow
import pytest

from train.config import TrackingConfig, TrainConfig
from train.faults.cause import Cause
from train.faults.last_words import LastWords, tell
from train.faults.marking import find_status

# MLflow's own, not ours to mend
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
GONE = Cause(kind="gone", ranks=(1,), message="rank 1 is gone")
STOPPED = Cause(kind="stopped", ranks=(0,), message="SIGTERM after step 7 of 9")


class ClosedTerminal:
    """What a terminal is once it is closed."""

    def write(self, _text: str) -> int:
        raise OSError(5, "Input/output error")

    flush = write


@pytest.fixture
def words(tracked: Callable[..., TrainConfig]) -> LastWords:
    """The words on a run that is under way."""
    config = tracked().tracking
    client = mlflow.MlflowClient(config.uri)
    words = LastWords(config, same_machine=True)
    words.run_id = client.create_run(client.create_experiment("any")).info.run_id
    words.advice = lambda: "go on by --resume auto"
    return words


def find_end(words: LastWords) -> tuple[str, str | None]:
    run = mlflow.MlflowClient(words._tracking.uri).get_run(words.run_id)
    return run.info.status, run.data.tags.get("failure")


def test_before_there_is_a_run_it_is_only_told(here, capsys):
    LastWords(TrackingConfig(uri=f"sqlite:///{here}/none.db"), same_machine=True).speak(GONE)
    assert capsys.readouterr().err == "error: rank 1 is gone\n"
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(("cause", "kind", "status"), [(GONE, "error", "FAILED"), (STOPPED, "stopped", "KILLED")])
def test_cause_and_advice_are_one_line_and_the_run_is_marked(words, capsys, cause, kind, status):
    words.speak(cause)
    assert capsys.readouterr().err == f"{kind}: {cause.message}; go on by --resume auto\n"
    assert find_end(words) == (status, cause.message)


def test_store_on_another_machine_is_left_to_the_next_start(words, capsys):
    other = LastWords(words._tracking, same_machine=False)
    other.run_id = words.run_id
    other.speak(GONE)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "error: rank 1 is gone"
    assert second.startswith(f"the MLflow run {words.run_id} is not marked: its store is a file on the main process's")
    assert find_status(words._tracking.uri, words.run_id) == "RUNNING"


def test_run_is_marked_though_nobody_can_read_the_line(words, monkeypatch):
    monkeypatch.setattr(sys, "stderr", ClosedTerminal())
    words.speak(GONE)
    monkeypatch.undo()
    assert find_end(words) == ("FAILED", "rank 1 is gone")


@pytest.mark.parametrize(("kind", "located"), [("raised", True), ("stopped", True), ("gone", False), ("hung", False)])
def test_cause_that_names_no_machine_is_told_with_where_each_rank_is(here, capsys, kind, located):
    tracking = TrackingConfig(uri=f"sqlite:///{here}/none.db")
    LastWords(tracking, same_machine=True, where="rank 1 on node7").speak(Cause(kind=kind, ranks=(1,), message="boom"))
    assert capsys.readouterr().err.endswith(": boom; rank 1 on node7\n" if located else ": boom\n")


@pytest.mark.parametrize(("first_here", "said"), [(True, "error: rank 1 is gone\n"), (False, "")])
def test_other_machine_repeats_the_cause_once_and_marks_nothing(words, capsys, first_here, said):
    other = LastWords(words._tracking, same_machine=False, first_here=first_here)
    other.run_id = words.run_id
    other.echo(GONE)
    assert capsys.readouterr().err == said
    assert find_end(words) == ("RUNNING", None)


def test_text_goes_to_standard_error(capsys):
    tell("two\nlines")
    assert capsys.readouterr() == ("", "two\nlines\n")
