"""A bundle as an MLflow model, for everybody's MLflow tools. Our own endpoint reads the bundle inside it instead.

Whoever publishes finds here what it takes: the proof that an engine computes a model, and the packaging.
"""

import io
import warnings
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # MLflow complains of its own type hints
    import mlflow.pyfunc
import pandas as pd  # type: ignore[import-untyped]
from mlflow.models import ModelSignature
from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema
from mlflow.types.schema import Array, Object, Property
from PIL import Image

import serve
import zoo
from serve.engines.engine import Engine as Engine
from serve.engines.opening import open_engine as open_engine
from serve.engines.proof import prove_engine
from serve.engines.proof import proving as proving
from serve.engines.self_test import check_engine as check_engine
from serve.errors import EngineError as EngineError
from serve.packaged import PLUGINS
from serve.protocol.schemas import DEFAULT_TOP_K
from zoo.card import ModelCard
from zoo.files.bundle_files import CARD
from zoo.files.golden import read_bundle_card
from zoo.plugin_check import check_plugins
from zoo.plugins import Plugin, find_plugin

_LIGHT = ("mlflow", "safetensors", "pydantic", "pillow", "numpy", "pandas")
_TORCH = ("torch", "torchvision", "timm", "einops")
_REQUIREMENTS = {"eager": (*_LIGHT, *_TORCH), "compile": (*_LIGHT, *_TORCH), "onnx": (*_LIGHT, "onnxruntime")}


def log_bundle(bundle: Path, *, name: str = "model") -> str:
    """Log the bundle in the directory `bundle` to the active MLflow run, as a pyfunc with its signature.

    The packages zoo and serve travel along as code, and the third-party packages as pinned requirements. So the
    model runs in an environment that MLflow makes for it; a requirement "attention-zoo" could be met only where an
    index has it, or by whoever takes that name on another one. A plugin's file travels as code too, beside the bundle
    and not in it; a plugin out of an installed package is one requirement more. The engine is the card's: with "onnx"
    neither torch nor a plugin is needed, and the file is compared with the weights here, whoever made it.

    Args:
        bundle: The bundle's directory.
        name: Name of the logged model within the run.

    Returns:
        The model's URI, to register it by.

    Raises:
        BundleError: If `bundle` is no bundle, or its attention's plugin is not loaded.
        UnfitEngineError: If its model.onnx computes something else than its weights.
        RuntimeError: If no run is active: MLflow would silently start one.
    """
    card = read_bundle_card(bundle)
    check_plugins(card, bundle / CARD)
    if card.engine.name == "onnx":
        from zoo.bundle import load_bundle  # loads torch

        prove_engine(bundle, load_bundle(bundle)[0])
    plugin = None if card.engine.name == "onnx" else find_plugin(card.attention)
    if mlflow.active_run() is None:
        raise RuntimeError("log_bundle wants an active MLflow run")
    with warnings.catch_warnings(), TemporaryDirectory() as folder:
        warnings.simplefilter("ignore", DeprecationWarning)  # MLflow's own use of pandas and SQLAlchemy
        info = mlflow.pyfunc.log_model(
            name=name,
            python_model=str(Path(__file__).with_name("pyfunc_model.py")),
            artifacts={"bundle": str(bundle)},
            code_paths=[*zoo.__path__, *serve.__path__, *_copy_plugin(plugin, Path(folder) / PLUGINS)],
            pip_requirements=[*map(_pin, _REQUIREMENTS[card.engine.name]), *_required_by(plugin)],
            signature=build_signature(),
            input_example=_build_example(card),
        )
    return str(info.model_uri)


def _pin(package: str) -> str:
    return f"{package}=={version(package).partition('+')[0]}"


def _required_by(plugin: Plugin | None) -> list[str]:
    return [_pin(plugin.source.distribution)] if plugin is not None and plugin.source.distribution else []


def _copy_plugin(plugin: Plugin | None, folder: Path) -> list[str]:
    """Copy a plugin's file into a new folder, so that on the path of imports it hides no module of its name."""
    if plugin is None or plugin.content is None or plugin.source.distribution is not None:
        return []
    folder.mkdir()
    plugin.write_copy(folder)
    return [str(folder)]


def _build_example(card: ModelCard) -> pd.DataFrame:
    """Make a table of one grey image: MLflow stores it beside the model as a request to copy."""
    height, width = card.preprocessing.size
    file = io.BytesIO()
    Image.new("L", (width, height), 128).save(file, "PNG")
    return pd.DataFrame({"image": [file.getvalue()]})


def build_signature() -> ModelSignature:
    """Describe the one column `image`, the parameter `top_k` and the answer."""
    score = [Property("label", DataType.string), Property("probability", DataType.double)]
    return ModelSignature(
        inputs=Schema([ColSpec(DataType.binary, "image")]),
        outputs=Schema(
            [
                ColSpec(DataType.string, "label"),
                ColSpec(DataType.double, "probability"),
                ColSpec(Array(Object(score)), "top"),
            ]
        ),
        params=ParamSchema([ParamSpec("top_k", DataType.long, DEFAULT_TOP_K)]),
    )
