"""The MLflow run: one for a training, written by the main process; on every other rank a Tracker does nothing."""

import json
import logging
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, JsonValue

from train.config import TrackingConfig
from train.errors import RunEnded, Stopped, TrackingError
from train.faults.cause import was_told
from train.faults.marking import FAILURE, TAG_LIMIT
from train.patience import ENVIRONMENT, hurried, undisturbed
from train.store import check_store, is_new, without_password

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)

_PARAM_LIMIT, _BATCH = 6000, 100
_PAUSE_S = 30.0  # after a try in vain; all ranks wait for each
_LAST_S = 60.0


class Tracker:
    """One MLflow run.

    Args:
        config: Where it is kept.
        main: Whether this is the main process; if not, nothing is written and MLflow is not even imported.
    """

    def __init__(self, config: TrackingConfig, *, main: bool = True) -> None:
        self._config, self._main = config, main
        self._client: MlflowClient | None = None
        self._logged: dict[str, int] = {}
        self._pending: list[tuple[dict[str, float], int]] = []
        self._paused_until = 0.0
        self.run_id = ""

    def check(self) -> None:
        """Make sure, on the main process, that the store answers and the experiment can be used; create nothing.

        Raises:
            TrackingError: If the store cannot be reached or used.
        """
        if not self._main:
            return
        check_store(self._config.uri)
        for variable, value in ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        with _quiet_import():
            import mlflow
        mlflow.set_tracking_uri(self._config.uri)
        if not is_new(self._config.uri):  # the client alone would make it
            self._connect()
            self._find_experiment()

    def start(self, config: BaseModel, *, run_id: str | None, tags: Mapping[str, str]) -> None:
        """Start the run, or go on with `run_id`; log the resolved config. Call `check` before.

        Raises:
            TrackingError: If the store cannot be used, or has no such run.
        """
        if not self._main:
            return
        import mlflow

        client = self._connect()
        with self._explained(f"run {run_id} cannot go on" if run_id else "no run can be started"):
            experiment_id = self._find_experiment() or self._make_experiment()
            run = mlflow.start_run(run_id, experiment_id, _name_run(config) if run_id is None else None)
            self.run_id = run.info.run_id
            resolved = config.model_dump(mode="json")
            if run_id is None:
                for chunk in _chunks({key: _param(value) for key, value in flatten(resolved).items()}):
                    mlflow.log_params(chunk)
                mlflow.log_dict(resolved, "config.json")
            else:
                self._logged = {key: self._last_step(key) for key in run.data.metrics}
                if FAILURE in run.data.tags:  # what ended it before stays to be read, under a number
                    before = sum(tag.startswith(f"{FAILURE}.") for tag in run.data.tags)
                    client.set_tag(run_id, f"{FAILURE}.{before + 1}", run.data.tags[FAILURE])
                    client.delete_tag(run_id, FAILURE)
        self.set_tags(tags)

    def log_metrics(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Log metrics of a step; a step that an earlier process of the same run has logged is not logged twice.

        A store that is out of reach costs a warning, not the training: metrics wait and go out with the next ones.
        """
        if self._client is None:
            return
        fresh = {key: value for key, value in metrics.items() if step > self._logged.get(key, -1)}
        if fresh:
            self._pending.append((fresh, step))
        self._flush(patient=True)

    def log_artifacts(self, folder: Path, name: str) -> None:
        """Copy a directory's files into the run, below `name`."""
        if self._client is not None:
            with self._explained(f"{folder} cannot be copied to it"):
                self._client.log_artifacts(self.run_id, str(folder), name)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags of the run."""
        if self._client is not None:
            with self._explained("tags cannot be set"):
                for key, value in tags.items():
                    self._client.set_tag(self.run_id, key, value[:TAG_LIMIT])

    def find_tag(self, run_id: str, key: str) -> str | None:
        """Return a tag of any run; None if it is not set, or on another rank than the main."""
        if self._client is None:
            return None
        with self._explained(f"run {run_id} cannot be read"):
            value = self._client.get_run(run_id).data.tags.get(key)
        return None if value is None else str(value)

    def pending(self) -> list[tuple[dict[str, float], int]]:
        """Return the metrics that still wait for the store, with their steps: what a checkpoint has to keep."""
        return list(self._pending)

    def restore_pending(self, pending: Sequence[tuple[Mapping[str, float], int]]) -> None:
        """Take up metrics that an earlier process of this run could not send; what has arrived since is left out."""
        for metrics, step in pending:
            self.log_metrics(metrics, step=step)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """End the run as the block ends: FINISHED; FAILED with the reason as the tag `failure`; KILLED by a signal.

        What the watch has told, and tagged, keeps its reason.
        """
        try:
            yield
        except BaseException as error:
            killed = isinstance(error, (KeyboardInterrupt, Stopped)) or (isinstance(error, RunEnded) and error.killed)
            reason = None if was_told(error) else f"{type(error).__name__}: {error}"
            try:
                with undisturbed(), hurried():
                    self._end("KILLED" if killed else "FAILED", failure=reason)
            except Exception as second:  # the first error is the one to tell
                logger.warning("the MLflow run %s could not be marked as failed: %s", self.run_id, second)
            raise
        self._end("FINISHED")

    def _end(self, status: str, failure: str | None = None) -> None:
        if self._client is None or not self.run_id:
            return
        import mlflow

        if failure is not None:
            self.set_tags({FAILURE: failure})
        if status == "FINISHED":
            self._flush_at_last()
        else:
            self._flush(patient=True)
        with self._explained("the run cannot be ended"):
            mlflow.end_run(status)

    def _flush_at_last(self) -> None:
        """Send the metrics that wait, for a minute if need be: a server that is down may just be starting again."""
        deadline = time.monotonic() + _LAST_S
        while True:
            try:
                return self._flush(patient=False)
            except TrackingError as error:
                if time.monotonic() > deadline:
                    raise
                logger.warning("%s; trying again, for a minute at most", _one_line(error))
                time.sleep(2)

    def _flush(self, *, patient: bool) -> None:
        """Send the metrics that wait; if `patient`, those that cannot be sent at once go on waiting, half a minute."""
        import mlflow
        from mlflow.exceptions import MlflowException

        if patient and time.monotonic() < self._paused_until:
            return
        try:
            with hurried() if patient else nullcontext():
                while self._pending:
                    metrics, step = self._pending[0]
                    mlflow.log_metrics(metrics, step=step, run_id=self.run_id)
                    del self._pending[0]
        except (MlflowException, OSError) as error:
            if not patient:
                raise TrackingError(f"{len(self._pending)} metrics could not be logged: {error}") from error
            self._paused_until = time.monotonic() + _PAUSE_S
            logger.warning("%d metrics wait for the tracking store: %s", len(self._pending), _one_line(error))

    def _connect(self) -> "MlflowClient":
        """Return the client; the first call opens the store, and makes it where it is an SQLite file to be."""
        import mlflow

        if self._client is None:
            with self._explained("cannot be used"):
                self._client = mlflow.MlflowClient()
        return self._client

    def _find_experiment(self) -> str | None:
        """Return the experiment's id, None if it is to be made."""
        assert self._client is not None
        with self._explained("cannot be used"):
            experiment = self._client.get_experiment_by_name(self._config.experiment)
        if experiment is None:
            return None
        if experiment.lifecycle_stage != "active":
            raise TrackingError(
                f"tracking.experiment {self._config.experiment!r} is deleted: restore it, or choose another"
            )
        return str(experiment.experiment_id)

    def _make_experiment(self) -> str:
        """Make the experiment, unless another training has done so since it was looked for; return its id."""
        from mlflow.exceptions import MlflowException

        assert self._client is not None
        try:
            return str(self._client.create_experiment(self._config.experiment))
        except MlflowException as error:
            found = self._find_experiment() if error.error_code == "RESOURCE_ALREADY_EXISTS" else None
            if found is None:
                raise
            return found

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Turn the store's errors into one line that names the store."""
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        try:
            yield
        except (MlflowException, SQLAlchemyError, OSError, ImportError) as error:  # ImportError: a database's driver
            raise TrackingError(
                f"tracking.uri {without_password(self._config.uri)}: {what}: {_one_line(error)}"
            ) from error

    def _last_step(self, key: str) -> int:
        assert self._client is not None
        return max(metric.step for metric in self._client.get_metric_history(self.run_id, key))


def _name_run(config: BaseModel) -> str:
    """Name a run by recipe and time: MLflow would draw a name from the stream that `seed` fixes, the same each time."""
    return f"{getattr(config, 'name', 'run')}-{time.strftime('%Y%m%d-%H%M%S')}"


def flatten(mapping: Mapping[str, JsonValue], prefix: str = "") -> dict[str, JsonValue]:
    """Return nested mappings as one, keys joined by dots; an empty mapping stays as a value."""
    flat: dict[str, JsonValue] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _param(value: JsonValue) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _PARAM_LIMIT else f"{text[: _PARAM_LIMIT - 20]}... (config.json)"


def _chunks(params: dict[str, str]) -> Iterator[dict[str, str]]:
    items = list(params.items())
    for start in range(0, len(items), _BATCH):
        yield dict(items[start : start + _BATCH])


def _one_line(error: Exception) -> str:
    """Return what an error says, without the statement that SQLAlchemy adds."""
    return " ".join(str(error).partition("\n[SQL:")[0].split())[:300]


@contextmanager
def _quiet_import() -> Iterator[None]:
    """Import MLflow without its own complaints of its own code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
