"""From a model's URI to its bundle on disk. Reads the registry and files; runs no code out of either."""

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import mlflow
import requests
from mlflow.artifacts import download_artifacts
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from sqlalchemy.exc import SQLAlchemyError

from serve.errors import LocateError
from zoo.bundle import CARD
from zoo.errors import did_you_mean

_MLFLOW = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
"""Set unless the user has: MLflow's own defaults would wait four minutes for a server that is not there."""

_MISSING = "RESOURCE_DOES_NOT_EXIST"
_FORMS = "models:/NAME@ALIAS, models:/NAME/VERSION or a bundle's directory"


@dataclass(frozen=True)
class LocatedModel:
    """A bundle on this machine, and what the registry calls it."""

    bundle: Path
    name: str
    version: str


def locate_model(uri: str, into: Path) -> LocatedModel:
    """Find the model at `uri` and have its bundle on this machine.

    Args:
        uri: "models:/NAME@ALIAS", "models:/NAME/VERSION", or the path of a bundle's directory.
        into: An existing directory for the download. A local bundle stays where it is.

    Returns:
        The bundle, not yet loaded nor checked.

    Raises:
        LocateError: If the URI is of no such form, or there is no such model, alias, version or server.
    """
    if not uri.startswith("models:"):
        path = Path(uri)
        if not (path / CARD).is_file():
            raise LocateError(f"{uri}: no bundle here ({CARD} is missing); wanted is {_FORMS}")
        return LocatedModel(path, path.resolve().name, "local")
    name, version, alias = _parse(uri)
    for variable, value in _MLFLOW.items():
        os.environ.setdefault(variable, value)
    registry = mlflow.get_registry_uri()
    _check_store(registry)
    try:
        found = _resolve(MlflowClient(), name, version, alias)
        files = Path(download_artifacts(artifact_uri=f"models:/{name}/{found.version}/artifacts", dst_path=str(into)))
    except (MlflowException, SQLAlchemyError, OSError) as error:
        if _is_out_of_reach(error):
            line = f"{uri}: no MLflow server answers at {registry}; is MLFLOW_TRACKING_URI right?"
            raise LocateError(_without_password(line, registry)) from error
        raise LocateError(_without_password(f"{uri}: cannot be read from {registry}: {error}", registry)) from error
    cards = list(files.glob(f"*/{CARD}"))
    if len(cards) != 1:
        raise LocateError(f"{uri}: version {found.version} holds no bundle of ours; was it published by train?")
    return LocatedModel(cards[0].parent, name, str(found.version))


def _parse(uri: str) -> tuple[str, str, str]:
    """Split a registry URI in name, version and alias; one of the latter is empty."""
    rest = uri.removeprefix("models:").lstrip("/")
    name, at, alias = rest.rpartition("@")
    if at and name and alias and "/" not in rest:
        return name, "", alias
    name, slash, version = rest.rpartition("/")
    if slash and name and version.isascii() and version.isdigit() and "/" not in name:
        return name, version, ""
    raise LocateError(f"{uri}: wanted is {_FORMS}")


def _resolve(client: MlflowClient, name: str, version: str, alias: str) -> ModelVersion:
    """Fix the version once, so that an alias that moves meanwhile cannot mix two."""
    try:
        model = client.get_registered_model(name)
    except MlflowException as error:
        if error.error_code != _MISSING:
            raise
        known = [model.name for model in client.search_registered_models()]
        near = did_you_mean(name, known) if known else "; the registry is empty, train a model first"
        raise LocateError(f"no registered model {name!r}{near}") from error
    if alias and alias not in model.aliases:
        raise LocateError(f"model {name!r} has no alias {alias!r}{did_you_mean(alias, model.aliases)}")
    try:
        return client.get_model_version(name, version or str(model.aliases[alias]))
    except MlflowException as error:
        if error.error_code != _MISSING:
            raise
        known = [str(found.version) for found in client.search_model_versions(f"name = '{name}'")]
        raise LocateError(f"model {name!r} has no version {version}; it has {', '.join(sorted(known))}") from error


def _check_store(uri: str) -> None:
    """Refuse an SQLite file that is not there: MLflow would make an empty one."""
    parts = urlsplit(uri)
    if parts.scheme.startswith("sqlite") and parts.path:
        path = Path(parts.path[1:])  # sqlite:///relative, sqlite:////absolute
        if not path.is_file():
            raise LocateError(f"no MLflow store at {path}; train a model here first, or set MLFLOW_TRACKING_URI")


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
