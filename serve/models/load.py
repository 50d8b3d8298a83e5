"""From a URI to a model that has answered: fetched, proven, warm, with a queue of its own."""

import re
from pathlib import Path
from tempfile import TemporaryDirectory

from serve.batching.batcher import BatchLimits
from serve.engines.engine import EngineOptions
from serve.engines.opening import choose_engine
from serve.errors import ServeError
from serve.models.aside import run_aside
from serve.models.locate import locate_model
from serve.models.served import ServedModel
from serve.models.uris import FoundVersion, ModelUri
from serve.operations.metrics import Metrics
from serve.predictor import Predictor
from serve.settings import Settings
from zoo.errors import ZooError
from zoo.files.golden import read_bundle_card

_FOLDERS = re.compile(r"(?<!models:)(?<![\w.])/(?:[^\s/:;,'\"]+/)*")
_LONGEST = 300


class Loader:
    """Loads models as the settings say; what is downloaded lies on disk only while it is loaded.

    Args:
        settings: Engine, device, limits.
        metrics: For the models that are loaded.
        folder: An existing directory for downloads.
    """

    def __init__(self, settings: Settings, metrics: Metrics, folder: Path) -> None:
        self._settings, self._metrics, self._folder = settings, metrics, folder

    async def load(self, uri: ModelUri, found: FoundVersion | None = None) -> tuple[ServedModel, FoundVersion]:
        """Fetch a model, open it with its engine, prove it and warm it up, while others answer.

        Args:
            uri: The model.
            found: The version that it means, where that has been asked already.

        Returns:
            The model, and its version.

        Raises:
            LocateError: If it cannot be found.
            OutOfReachError: If the registry does not answer.
            BundleError: If it is damaged, or answers otherwise than when it was saved.
            EngineError: If its engine is not installed here, or cannot run it.
            RuntimeError: If it cannot answer a request.
        """
        predictor, version = await run_aside(self._open, uri, found)
        served = ServedModel(predictor, get_limits(self._settings), self._metrics)
        try:
            await served.warm_up()
        except BaseException:
            await served.batcher.close()
            raise
        return served, version

    def _open(self, uri: ModelUri, found: FoundVersion | None) -> tuple[Predictor, FoundVersion]:
        settings = self._settings
        with TemporaryDirectory(dir=self._folder, ignore_cleanup_errors=True) as into:
            located = locate_model(uri, Path(into), found)
            predictor = Predictor.from_bundle(
                located.bundle,
                name=located.name,
                version=located.version,
                choice=choose_engine(read_bundle_card(located.bundle), settings.engine, settings.precision),
                options=EngineOptions(settings.device, settings.threads, settings.max_batch),
            )
        predictor.engine.warm_up()
        return predictor, located.found


def get_limits(settings: Settings) -> BatchLimits:
    """Return how requests become batches."""
    return BatchLimits(settings.max_batch, settings.batch_wait_ms / 1000, settings.max_queue)


def is_understood(error: Exception) -> bool:
    """Say whether the message of an error is for its reader, and not for us."""
    return isinstance(error, ServeError | ZooError)


def explain(error: Exception) -> str:
    """Say in one line, without a path of this machine, why a version cannot be served."""
    if not is_understood(error):
        return f"it fails here ({type(error).__name__}); see the server's log"
    return " ".join(_FOLDERS.sub("", str(error)).split())[:_LONGEST]
