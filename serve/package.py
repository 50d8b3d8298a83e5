"""A bundle as an MLflow model, for everybody's MLflow tools. Our own endpoint reads the bundle inside it instead."""

from importlib.metadata import version
from pathlib import Path

import mlflow.pyfunc
from mlflow.models import ModelSignature
from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema
from mlflow.types.schema import Array, Object, Property

import serve
import zoo
from serve.schemas import DEFAULT_TOP_K
from zoo.errors import BundleError

_REQUIREMENTS = (
    "mlflow",
    "torch",
    "torchvision",
    "timm",
    "einops",
    "safetensors",
    "pydantic",
    "pillow",
    "numpy",
    "pandas",
)


def log_bundle(bundle: Path, *, name: str = "model") -> str:
    """Log the bundle in the directory `bundle` to the active MLflow run, as a pyfunc with its signature.

    The packages zoo and serve travel along as code, and the third-party packages as pinned requirements. So the
    model runs in an environment that MLflow makes for it; a requirement "attention-zoo" could be met only where an
    index has it, or by whoever takes that name on another one.

    Args:
        bundle: The bundle's directory.
        name: Name of the logged model within the run.

    Returns:
        The model's URI, to register it by.

    Raises:
        BundleError: If `bundle` is no directory.
        RuntimeError: If no run is active: MLflow would silently start one.
    """
    if not bundle.is_dir():
        raise BundleError(f"{bundle}: no bundle here")
    if mlflow.active_run() is None:
        raise RuntimeError("log_bundle wants an active MLflow run")
    info = mlflow.pyfunc.log_model(
        name=name,
        python_model=str(Path(__file__).with_name("pyfunc_model.py")),
        artifacts={"bundle": str(bundle)},
        code_paths=[folder for package in (zoo, serve) for folder in package.__path__],
        pip_requirements=[f"{package}=={version(package).partition('+')[0]}" for package in _REQUIREMENTS],
        signature=build_signature(),
    )
    return str(info.model_uri)


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
