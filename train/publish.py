"""From trained weights to a registered version: bundle, MLflow model, version, load-test, and only then the alias."""

import contextlib
import io
import logging
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from train.config import PublishConfig
from train.errors import PublishError
from zoo.bundle import Proof, save_bundle
from zoo.card import Lineage, ModelCard, read_card
from zoo.errors import BundleError, UnfitEngineError
from zoo.plugins import Plugin, find_plugin

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)

SCORE, FINGERPRINT = "val/top1", "val_fingerprint"
TOOK = "took_alias"  # the alias that a version took by its score: how trainings that end at once find one another
_PACKAGES = ("torch", "timm", "accelerate", "mlflow", "einops", "safetensors", "pydantic", "numpy", "pillow")


@dataclass(frozen=True)
class Published:
    """A registered version, and where the alias points now.

    Attributes:
        name: The registered model.
        version: The version that was made.
        alias: The alias.
        alias_version: The version that the alias names, this one or the one it kept; None if it names none.
        reason: Why the alias moved or stayed.
    """

    name: str
    version: str
    alias: str
    alias_version: str | None
    reason: str

    def __str__(self) -> str:
        where = f"@{self.alias} -> version {self.alias_version}" if self.alias_version else f"no @{self.alias}"
        return f"{self.name} version {self.version}, {where} ({self.reason})"


def find_lineage(run_id: str) -> Lineage:
    """Describe what a bundle comes from: run, commit of the working directory (with "+changes"), package versions."""
    return Lineage(run_id=run_id, git_commit=find_git_commit(), packages={name: version(name) for name in _PACKAGES})


def find_git_commit() -> str | None:
    """Return the commit that is checked out in the current directory, None where there is none or no git."""
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changes = subprocess.run(["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{commit}+changes" if changes.stdout.strip() else commit


def write_bundle(model: nn.Module, card: ModelCard, path: Path, *, prove: Proof | None = None) -> Path:
    """Save the bundle at `path`, which must be new; return it.

    Raises:
        PublishError: If it cannot be written, or does not answer as the model does.
        UnfitEngineError: If the engine that the card names cannot compute it; nothing is left at `path`.
    """
    try:
        save_bundle(model, card, path, prove=prove)
    except UnfitEngineError:
        raise
    except (BundleError, OSError) as error:
        raise PublishError(f"the bundle {path} cannot be written: {error}") from error
    return path


def publish(bundle: Path, card: ModelCard, name: str, config: PublishConfig) -> Published:
    """Register the bundle of the active MLflow run as a version, load it back, and move the alias if it is better.

    Args:
        bundle: The bundle's directory; it stays, whatever happens here.
        card: Its card, with the score and the fingerprint of the validation images.
        name: The registered model; made if it is missing.
        config: Which alias, and whether it moves whatever the score.

    Raises:
        PublishError: If MLflow refuses, or the registered version does not load and answer as the bundle does; the
            alias is then where it was.
    """
    import mlflow
    from mlflow.exceptions import MlflowException

    from serve.package import log_bundle

    score, fingerprint = card.metrics[SCORE], card.data_fingerprint or ""
    client = mlflow.MlflowClient()
    plugin = find_plugin(card.attention)
    try:
        if plugin is not None:
            keep_source(plugin)
        model_uri = log_bundle(bundle)
        tags = {SCORE: repr(score), FINGERPRINT: fingerprint}
        with contextlib.redirect_stderr(io.StringIO()):  # MLflow prints there what `Published` says
            made = mlflow.register_model(model_uri, name, tags=tags, await_registration_for=60)
        load_test(f"models:/{name}/{made.version}", bundle)
        mine = Champion(str(made.version), score, fingerprint)
        named, reason = move_alias(client, name, mine, config)
    except (MlflowException, OSError) as error:
        raise PublishError(
            f"{name}: the registry refused ({' '.join(str(error).split())[:300]}); the bundle is kept in {bundle}"
        ) from error
    return Published(name, mine.version, config.alias, named, reason)


def keep_source(plugin: Plugin) -> None:
    """Keep the file of the trained variant with the active MLflow run, below `plugins`, for people to read."""
    import mlflow

    with tempfile.TemporaryDirectory() as folder:
        if (copy := plugin.write_copy(Path(folder))) is not None:
            mlflow.log_artifact(str(copy), "plugins")


@dataclass(frozen=True)
class Champion:
    """A version that has the alias or wants it, its score (None if it has none) and the images it was scored on."""

    version: str
    score: float | None
    fingerprint: str | None


def find_version(client: "MlflowClient", name: str, alias: str) -> Champion | None:
    """Return what the alias names, or None."""
    found = client.get_registered_model(name).aliases.get(alias)
    if found is None:
        return None
    return _describe(found, client.get_model_version(name, str(found)).tags)


def _quoted(text: str) -> str:
    return f'"{text}"' if "'" in text else f"'{text}'"


def _describe(version: object, tags: Mapping[str, str]) -> Champion:
    try:
        score = float(tags[SCORE])
    except (KeyError, ValueError):
        score = None
    return Champion(str(version), score, tags.get(FINGERPRINT))


def move_alias(client: "MlflowClient", name: str, mine: Champion, config: PublishConfig) -> tuple[str, str]:
    """Give a version the alias if it beats the one that has it; return the version that has it now, and why.

    Two trainings that end together both beat the old champion, and MLflow sets an alias unconditionally: the worse one
    may come last. So whoever has taken the alias says so on its version and looks for others that did; the last of them
    sees all, and leaves the alias with the best.
    """
    assert mine.score is not None
    before = {rival.version for rival in find_takers(client, name, config.alias)}
    champion = find_version(client, name, config.alias)
    moves, reason = beats(mine.score, mine.fingerprint or "", champion, forced=config.force)
    if not moves:
        assert champion is not None
        return champion.version, reason
    set_alias(client, name, config.alias, mine.version)
    if config.force:
        return mine.version, reason
    client.set_model_version_tag(name, mine.version, TOOK, config.alias)
    while True:
        takers = [rival for rival in find_takers(client, name, config.alias) if rival.version not in before]
        rivals = {rival.version: rival for rival in [mine, *takers] if rival.fingerprint == mine.fingerprint}
        best = max(rivals.values(), key=lambda rival: (rival.score or 0.0, -int(rival.version)))
        now = find_version(client, name, config.alias)
        if now is None or now.version == best.version or now.version not in rivals:  # or somebody has moved it since
            break
        set_alias(client, name, config.alias, best.version)
    if best.version != mine.version:
        reason = f"version {best.version}, published at the same time, has {best.score:.4f}, this one {mine.score:.4f}"
    return best.version if now is None else now.version, reason


def set_alias(client: "MlflowClient", name: str, alias: str, version: str) -> None:
    """Point the alias to a version.

    On a database, two that make it at once can collide on its primary key. There it is then, so that the second attempt
    changes it; an error of another kind comes back from that one too.
    """
    from mlflow.exceptions import MlflowException

    try:
        client.set_registered_model_alias(name, alias, version)
    except MlflowException as error:
        logger.debug("%s@%s is set a second time: %s", name, alias, error)
        client.set_registered_model_alias(name, alias, version)


def find_takers(client: "MlflowClient", name: str, alias: str) -> list[Champion]:
    """Return the versions that have taken the alias by their score, in no order."""
    found = client.search_model_versions(f"name={_quoted(name)} and tags.{TOOK}={_quoted(alias)}")
    return [_describe(version.version, version.tags) for version in found]


def beats(score: float, fingerprint: str, champion: Champion | None, *, forced: bool) -> tuple[bool, str]:
    """Decide whether a version takes the alias, and say why in a few words."""
    if champion is None:
        return True, "the first version"
    if forced:
        return True, "--publish.force"
    if champion.score is None or champion.fingerprint != fingerprint:
        return False, f"version {champion.version} was scored on other images; --publish.force moves it"
    if score > champion.score:
        return True, f"{score:.4f} beats {champion.score:.4f}"
    return False, f"{score:.4f} does not beat {champion.score:.4f}"


def load_test(model_uri: str, bundle: Path) -> None:
    """Download a registered version and hold its answer to the golden example against that of the local bundle.

    The engine that its card names answers, as where it will be served.

    Raises:
        PublishError: If it does not load or does not answer the same.
    """
    from mlflow.artifacts import download_artifacts

    from serve.package import EngineError, check_engine, open_engine

    with tempfile.TemporaryDirectory() as folder:
        root = Path(download_artifacts(artifact_uri=f"{model_uri}/artifacts", dst_path=folder))
        cards = list(root.glob("*/card.json"))
        if len(cards) != 1:
            raise PublishError(f"{model_uri}: holds {len(cards)} bundles, wanted one; the alias was not moved")
        try:
            card = read_card(cards[0])
            engine, _ = open_engine(cards[0].parent, card)
            check_engine(engine, bundle, card)
        except (BundleError, EngineError) as error:
            raise PublishError(f"{model_uri}: failed its load-test, the alias was not moved: {error}") from error
