import json
import logging
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import mlflow
import pytest
from mlflow.exceptions import MlflowException
from pydantic import BaseModel, JsonValue

from train import tracking
from train.config import TrackingConfig, TrainConfig
from train.errors import RunEnded, Stopped, TrackingError
from train.faults.cause import TOLD
from train.faults.marking import mark_ended
from train.tracking import Tracker, flatten

# MLflow's own, not ours to mend
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")


class Settings(BaseModel):
    """What a run's config may hold at its worst."""

    text: str = "日本"
    inner: dict[str, JsonValue] = {"one": 1, "deep": {"two": [1, 2], "none": None}, "empty": {}}


@pytest.fixture
def config(tracked: Callable[..., TrainConfig]) -> TrackingConfig:
    return tracked().tracking


@pytest.fixture
def tracker(config: TrackingConfig) -> Iterator[Tracker]:
    tracker = Tracker(config)
    tracker.check()
    tracker.start(Settings(), run_id=None, tags={"a": "b"})
    return tracker


def run_of(tracker: Tracker) -> mlflow.entities.Run:
    return mlflow.MlflowClient().get_run(tracker.run_id)


def history(tracker: Tracker, key: str) -> list[tuple[int, float]]:
    return [(m.step, m.value) for m in mlflow.MlflowClient().get_metric_history(tracker.run_id, key)]


def all_runs() -> list[mlflow.entities.Run]:
    client = mlflow.MlflowClient()
    return client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])


def test_run_holds_params_tags_and_the_resolved_config(tracker, here):
    with tracker.ending():
        pass
    run = run_of(tracker)
    assert run.info.status == "FINISHED"
    assert run.data.tags["a"] == "b"
    assert run.data.params == {
        "text": "日本",
        "inner.one": "1",
        "inner.deep.two": "[1, 2]",
        "inner.deep.none": "null",
        "inner.empty": "{}",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        file = mlflow.artifacts.download_artifacts(run_id=tracker.run_id, artifact_path="config.json", dst_path=here)
    assert json.loads(Path(file).read_text(encoding="utf-8")) == Settings().model_dump(mode="json")


def test_flat_keys_are_dotted_and_an_empty_mapping_stays():
    assert flatten({"a": {"b": 1, "c": {}}, "d": [1]}) == {"a.b": 1, "a.c": {}, "d": [1]}


def test_many_and_long_params_are_all_logged(config):
    tracker = Tracker(config)
    tracker.check()
    tracker.start(
        Settings(text="x" * 7000, inner={f"key{i}": i for i in range(150)}), run_id=None, tags={"long": "y" * 9000}
    )
    data = run_of(tracker).data
    assert len(data.params) == 151
    assert data.params["text"].endswith("... (config.json)")
    assert len(data.tags["long"]) == 5000


def test_exception_ends_the_run_as_failed_with_its_reason(tracker):
    with pytest.raises(RuntimeError, match="lost"), tracker.ending():
        raise RuntimeError("lost")
    assert run_of(tracker).info.status == "FAILED"
    assert run_of(tracker).data.tags["failure"] == "RuntimeError: lost"


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), Stopped(), RunEnded("SIGTERM on rank 1", killed=True)])
def test_signal_ends_the_run_as_killed(tracker, stop):
    with pytest.raises(type(stop)), tracker.ending():
        raise stop
    assert run_of(tracker).info.status == "KILLED"


def test_what_another_rank_did_ends_the_run_as_failed(tracker):
    with pytest.raises(RunEnded), tracker.ending():
        raise RunEnded("rank 1: boom", status=2)
    assert run_of(tracker).info.status == "FAILED"


def test_reason_that_was_told_and_tagged_is_kept(tracker):
    assert mark_ended(mlflow.get_tracking_uri(), tracker.run_id, "FAILED", "rank 1 is gone")
    error = RuntimeError("Connection closed by peer")
    error.add_note(TOLD)
    with pytest.raises(RuntimeError), tracker.ending():
        raise error
    assert run_of(tracker).info.status == "FAILED"
    assert run_of(tracker).data.tags["failure"] == "rank 1 is gone"


def test_sigterm_while_a_failure_is_recorded_does_not_leave_the_run_unended(tracker, monkeypatch):
    """A launcher ends the other ranks as soon as one has left: the signal comes while they say why they failed."""

    def stop(_signal, _frame):
        raise Stopped

    signal.signal(signal.SIGTERM, stop)
    real = tracker.set_tags

    def set_tags(tags):
        os.kill(os.getpid(), signal.SIGTERM)
        real(tags)

    monkeypatch.setattr(tracker, "set_tags", set_tags)
    with pytest.raises(RuntimeError, match="Connection closed by peer"), tracker.ending():
        raise RuntimeError("Connection closed by peer")
    assert run_of(tracker).info.status == "FAILED"
    assert run_of(tracker).data.tags["failure"] == "RuntimeError: Connection closed by peer"
    assert signal.getsignal(signal.SIGTERM) is stop


def test_failure_that_cannot_be_recorded_is_told_and_the_first_error_raised(tracker, monkeypatch, caplog):
    def refuse(*_args, **_kwargs):
        raise MlflowException("gone")

    monkeypatch.setattr(mlflow.MlflowClient, "set_tag", refuse)
    with caplog.at_level(logging.WARNING), pytest.raises(RuntimeError, match="lost"), tracker.ending():
        raise RuntimeError("lost")
    assert "could not be marked as failed" in caplog.text


def test_metrics_wait_while_the_store_fails_and_arrive_once(tracker, monkeypatch, caplog):
    real, failures = mlflow.log_metrics, iter([True, True])

    def log_metrics(*args, **kwargs):
        if next(failures, False):
            raise MlflowException("the store is\nout of reach")
        return real(*args, **kwargs)

    monkeypatch.setattr(mlflow, "log_metrics", log_metrics)
    monkeypatch.setattr(tracking, "_PAUSE_S", 0.0)
    with caplog.at_level(logging.WARNING), tracker.ending():
        for step in range(1, 4):
            tracker.log_metrics({"train/loss": step / 2, "train/lr": 0.1}, step=step)
    assert history(tracker, "train/loss") == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert history(tracker, "train/lr") == [(1, 0.1), (2, 0.1), (3, 0.1)]
    assert [record.getMessage() for record in caplog.records if record.name == "train.tracking"] == [
        "1 metrics wait for the tracking store: the store is out of reach",
        "2 metrics wait for the tracking store: the store is out of reach",
    ]


def test_store_that_fails_is_asked_once_in_a_hurry_and_then_left_alone_for_a_while(tracker, monkeypatch, caplog):
    asked = []

    def refuse(*_args, **_kwargs):
        asked.append([os.environ[f"MLFLOW_HTTP_REQUEST_{name}"] for name in ("MAX_RETRIES", "TIMEOUT")])
        raise MlflowException("gone")

    before = dict(os.environ)
    with monkeypatch.context() as patched:
        patched.setattr(mlflow, "log_metrics", refuse)
        for step in range(1, 6):
            tracker.log_metrics({"train/loss": 1.0}, step=step)
    assert asked == [["0", "4"]]
    assert dict(os.environ) == before
    assert [step for _, step in tracker.pending()] == [1, 2, 3, 4, 5]
    assert len([record for record in caplog.records if "wait for the tracking store" in record.getMessage()]) == 1
    with tracker.ending():
        pass
    assert [step for step, _ in history(tracker, "train/loss")] == [1, 2, 3, 4, 5]


def test_server_that_starts_again_at_the_very_end_is_waited_for(tracker, monkeypatch, caplog):
    real, failures = mlflow.log_metrics, iter([True, True, True])

    def log_metrics(*args, **kwargs):
        if next(failures, False):
            raise MlflowException("starting")
        return real(*args, **kwargs)

    monkeypatch.setattr(mlflow, "log_metrics", log_metrics)
    monkeypatch.setattr(tracking.time, "sleep", lambda _seconds: None)
    with caplog.at_level(logging.WARNING), tracker.ending():
        tracker.log_metrics({"train/loss": 1.0}, step=1)
    assert history(tracker, "train/loss") == [(1, 1.0)]
    assert "trying again, for a minute at most" in caplog.text


def test_metrics_that_never_arrive_are_an_error_at_the_end(tracker, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise MlflowException("gone")

    monkeypatch.setattr(mlflow, "log_metrics", refuse)
    monkeypatch.setattr(tracking, "_LAST_S", 0.0)
    monkeypatch.setattr(tracking.time, "sleep", lambda _seconds: None)
    tracker.log_metrics({"a": 1.0}, step=1)
    tracker.log_metrics({"a": 2.0}, step=2)
    with pytest.raises(TrackingError, match="2 metrics could not be logged: gone"), tracker.ending():
        pass


def test_resumed_run_goes_on_with_each_step_once_and_with_the_old_failure_under_a_number(tracker, config):
    for step in (1, 2, 3):
        tracker.log_metrics({"train/loss": float(step)}, step=step)
    with pytest.raises(RuntimeError), tracker.ending():
        raise RuntimeError("lost")
    resumed = start_again(config, tracker.run_id)
    with resumed.ending():
        for step in (2, 3, 4):
            resumed.log_metrics({"train/loss": float(step), "new": 0.0}, step=step)
    assert history(tracker, "train/loss") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert history(tracker, "new") == [(2, 0.0), (3, 0.0), (4, 0.0)]
    assert run_of(tracker).info.status == "FINISHED"
    assert failures(tracker) == {"failure.1": "RuntimeError: lost"}
    again = start_again(config, tracker.run_id)
    with pytest.raises(ValueError, match="again"), again.ending():
        raise ValueError("again")
    start_again(config, tracker.run_id)
    assert failures(tracker) == {"failure.1": "RuntimeError: lost", "failure.2": "ValueError: again"}
    assert len(all_runs()) == 1


def start_again(config: TrackingConfig, run_id: str) -> Tracker:
    tracker = Tracker(config)
    tracker.check()
    tracker.start(Settings(), run_id=run_id, tags={})
    return tracker


def failures(tracker: Tracker) -> dict[str, str]:
    return {key: value for key, value in run_of(tracker).data.tags.items() if key.startswith("failure")}


def test_experiment_that_another_training_makes_meanwhile_is_taken(config, monkeypatch):
    tracker, real = Tracker(config), Tracker._find_experiment
    tracker.check()

    def look_too_early(self):
        monkeypatch.setattr(Tracker, "_find_experiment", real)
        assert self._client.create_experiment(config.experiment) != ""
        return

    monkeypatch.setattr(Tracker, "_find_experiment", look_too_early)
    tracker.start(Settings(), run_id=None, tags={})
    assert run_of(tracker).info.status == "RUNNING"
    assert len(all_runs()) == 1
    with tracker.ending():
        pass


def test_run_that_does_not_exist_cannot_go_on(config):
    tracker = Tracker(config)
    tracker.check()
    with pytest.raises(TrackingError, match="run 0123 cannot go on"):
        tracker.start(Settings(), run_id="0123", tags={})
    with pytest.raises(TrackingError, match="run 0123 cannot be read"):
        tracker.find_tag("0123", "published")


def test_other_ranks_do_nothing(config):
    tracker = Tracker(config, main=False)
    tracker.check()
    tracker.start(Settings(), run_id=None, tags={})
    with tracker.ending():
        tracker.log_metrics({"a": 1.0}, step=1)
    assert tracker.run_id == ""
    assert tracker.find_tag("any", "published") is None
    mlflow.set_tracking_uri(config.uri)
    assert all_runs() == []


def test_check_of_a_store_makes_no_experiment(config):
    Tracker(config).check()
    assert mlflow.MlflowClient().get_experiment_by_name("attention-zoo") is None


def test_deleted_experiment_is_named(config):
    client = mlflow.MlflowClient(config.uri)
    client.delete_experiment(client.create_experiment("old"))
    with pytest.raises(TrackingError, match=r"tracking\.experiment 'old' is deleted: restore it, or choose another"):
        Tracker(config.model_copy(update={"experiment": "old"})).check()
