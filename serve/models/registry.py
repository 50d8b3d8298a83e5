"""MLflow's registry: which version an alias means, and its bundle. Imported only where a URI of the registry is met."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import mlflow
import requests
from mlflow.artifacts import download_artifacts
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from serve.errors import LocateError, OutOfReachError
from serve.models.uris import FoundVersion, LocatedModel, ModelUri
from zoo.errors import did_you_mean
from zoo.files.bundle_files import CARD

_FAILURES: tuple[type[Exception], ...] = (MlflowException, OSError)
try:
    from sqlalchemy.exc import SQLAlchemyError
except ModuleNotFoundError:  # as in the image `serve`, which reads tracking servers alone
    pass
else:
    _FAILURES = (*_FAILURES, SQLAlchemyError)

_MLFLOW = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
"""Set unless the user has: MLflow's own defaults would wait four minutes for a server that is not there."""

_MISSING = "RESOURCE_DOES_NOT_EXIST"


def find_version(uri: ModelUri) -> FoundVersion:
    """Ask which version `uri` means now. The version is fixed once: an alias that moves meanwhile cannot mix two.

    Raises:
        LocateError: If there is no such model, alias or version; the message names the nearest.
        OutOfReachError: If the registry does not answer, or not with sense.
    """
    with _explained(uri):
        client = MlflowClient()
        try:
            found = (
                client.get_model_version_by_alias(uri.name, uri.alias)
                if uri.alias
                else client.get_model_version(uri.name, uri.version)
            )
        except MlflowException as error:
            if _is_out_of_reach(error):
                raise
            found = _explain_missing(client, uri, error)
        return FoundVersion(str(found.version), int(found.creation_timestamp))


def fetch_version(uri: ModelUri, found: FoundVersion, into: Path) -> LocatedModel:
    """Download a version's bundle to the existing directory `into`.

    Raises:
        LocateError: If the version holds no bundle.
        OutOfReachError: If the registry, or the store of its files, does not answer with sense.
    """
    with _explained(uri):
        source = f"models:/{uri.name}/{found.version}/artifacts"
        files = Path(download_artifacts(artifact_uri=source, dst_path=str(into)))
    cards = list(files.glob(f"*/{CARD}"))
    if len(cards) != 1:
        raise LocateError(f"{uri.text}: version {found.version} holds no bundle of ours; was it published by train?")
    return LocatedModel(cards[0].parent, uri.name, found)


@contextmanager
def _explained(uri: ModelUri) -> Iterator[None]:
    """Turn whatever MLflow raises into one line without the store's password."""
    for variable, value in _MLFLOW.items():
        os.environ.setdefault(variable, value)
    registry = mlflow.get_registry_uri()
    _check_store(registry)
    try:
        yield
    except ModuleNotFoundError as error:
        line = f"{uri.text}: to read {registry} takes the package {error.name}, which is not installed here"
        raise LocateError(_without_password(f"{line}; MLFLOW_TRACKING_URI may name a server", registry)) from error
    except _FAILURES as error:
        if _is_out_of_reach(error):
            line = f"{uri.text}: no MLflow server answers at {registry}; is MLFLOW_TRACKING_URI right?"
            raise OutOfReachError(_without_password(line, registry)) from error
        line = f"{uri.text}: cannot be read from {registry}: {error}"
        raise OutOfReachError(_without_password(line, registry)) from error


def _explain_missing(client: MlflowClient, uri: ModelUri, error: MlflowException) -> ModelVersion:
    """Say what the registry lacks of `uri`; the alias may also have come back meanwhile, then return its version."""
    try:
        model = client.get_registered_model(uri.name)
    except MlflowException as missing:
        if missing.error_code != _MISSING:
            raise
        known = [model.name for model in client.search_registered_models()]
        near = did_you_mean(uri.name, known) if known else "; the registry is empty, train a model first"
        raise LocateError(f"no registered model {uri.name!r}{near}") from missing
    if uri.alias and uri.alias not in model.aliases:
        raise LocateError(f"model {uri.name!r} has no alias {uri.alias!r}{did_you_mean(uri.alias, model.aliases)}")
    if uri.alias:
        return client.get_model_version(uri.name, str(model.aliases[uri.alias]))
    if error.error_code != _MISSING:
        raise error
    known = [str(found.version) for found in client.search_model_versions(f"name = '{uri.name}'")]
    raise LocateError(
        f"model {uri.name!r} has no version {uri.version}; it has {', '.join(sorted(known)) or 'none'}"
    ) from error


def _check_store(uri: str) -> None:
    """Refuse an SQLite file that is not there: MLflow would make an empty one."""
    parts = urlsplit(uri)
    if parts.scheme.startswith("sqlite") and parts.path:
        path = Path(parts.path[1:])  # sqlite:///relative, sqlite:////absolute
        if not path.is_file():
            raise OutOfReachError(f"no MLflow store at {path}; train a model here first, or set MLFLOW_TRACKING_URI")


def _is_out_of_reach(error: BaseException | None) -> bool:
    """Tell a server that cannot be connected to, which MLflow wraps in an error of its own."""
    while error is not None and not isinstance(error, requests.ConnectionError | requests.Timeout):
        error = error.__context__
    return error is not None


def _without_password(message: str, uri: str) -> str:
    """Put the message on one line, without the user and password that `uri` may hold."""
    credentials = urlsplit(uri).netloc.rpartition("@")[0]
    if credentials:
        message = message.replace(f"{credentials}@", "")
    return " ".join(message.split())[:500]
