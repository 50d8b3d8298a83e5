"""What a model's URI says, and what it comes to: a version, a bundle on disk."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from serve.errors import LocateError

FORMS: Final = "models:/NAME@ALIAS, models:/NAME/VERSION or a bundle's directory"


@dataclass(frozen=True)
class ModelUri:
    """What a URI says, before anything is looked for.

    Attributes:
        text: The URI.
        name: What the model is called in requests: the registered model's name, or the directory's.
        version: The version, of a URI that names one.
        alias: The alias, of a URI that names one: it may come to mean another version.
        folder: The bundle, of a URI that is a directory.
    """

    text: str
    name: str
    version: str = ""
    alias: str = ""
    folder: Path | None = None


@dataclass(frozen=True)
class FoundVersion:
    """What a URI means at a moment.

    Attributes:
        version: The version in the registry, "local" of a directory.
        created_ms: When the registry made it, in milliseconds of the epoch: a model that was deleted and registered
            anew counts its versions from 1 again.
    """

    version: str
    created_ms: int = 0


@dataclass(frozen=True)
class LocatedModel:
    """A bundle on this machine, and what the registry calls it.

    Attributes:
        bundle: The bundle's directory.
        name: What the model is called in requests.
        found: Its version.
    """

    bundle: Path
    name: str
    found: FoundVersion

    @property
    def version(self) -> str:
        """Its version in the registry, "local" of a directory."""
        return self.found.version


def parse_uri(uri: str) -> ModelUri:
    """Split a URI; nothing is looked for yet.

    Raises:
        LocateError: If it is of none of the forms.
    """
    if not uri.startswith("models:"):
        path = Path(uri)
        return ModelUri(uri, path.resolve().name, folder=path)
    rest = uri.removeprefix("models:").lstrip("/")
    name, at, alias = rest.rpartition("@")
    if at and name and alias and "/" not in rest:
        return ModelUri(uri, name, alias=alias)
    name, slash, version = rest.rpartition("/")
    if slash and name and version.isascii() and version.isdigit() and "/" not in name:
        return ModelUri(uri, name, version=version)
    raise LocateError(f"{uri}: wanted is {FORMS}")


def parse_uris(uris: Sequence[str]) -> list[ModelUri]:
    """Split the URIs of all models of one server.

    Raises:
        LocateError: If one is of none of the forms, or two would answer to one name.
    """
    parsed: dict[str, ModelUri] = {}
    for uri in map(parse_uri, uris):
        if uri.name in parsed:
            raise LocateError(
                f"{parsed[uri.name].text} and {uri.text} would both be called {uri.name!r}: one server has one model "
                "of a name; serve the other on another port, or rename its directory"
            )
        parsed[uri.name] = uri
    return list(parsed.values())
