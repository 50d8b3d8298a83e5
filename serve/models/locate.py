"""From a model's URI to its bundle on disk. MLflow is imported where a URI of its registry is met, and not before."""

from pathlib import Path

from serve.errors import LocateError
from serve.models.uris import FORMS, FoundVersion, LocatedModel, ModelUri, parse_uri
from zoo.files.bundle_files import CARD


def locate_model(uri: str | ModelUri, into: Path, found: FoundVersion | None = None) -> LocatedModel:
    """Find the model at `uri` and have its bundle on this machine.

    Args:
        uri: "models:/NAME@ALIAS", "models:/NAME/VERSION", or the path of a bundle's directory.
        into: An existing directory for the download. A local bundle stays where it is.
        found: What the URI means, where that has been asked already.

    Returns:
        The bundle, not yet loaded nor checked.

    Raises:
        LocateError: If the URI is of no such form, or there is no such model, alias or version.
        OutOfReachError: If the registry does not answer.
    """
    parsed = parse_uri(uri) if isinstance(uri, str) else uri
    if parsed.folder is not None:
        if not (parsed.folder / CARD).is_file():
            raise LocateError(f"{parsed.text}: no bundle here ({CARD} is missing); wanted is {FORMS}")
        return LocatedModel(parsed.folder, parsed.name, FoundVersion("local"))
    from serve.models.registry import fetch_version, find_version

    return fetch_version(parsed, found or find_version(parsed), into)
