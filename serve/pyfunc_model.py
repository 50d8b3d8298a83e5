"""The MLflow model's code: a bundle behind MLflow's own tools. MLflow runs this file; nothing here imports it.

The numbers are the endpoint's own: the same decoding, transform, engine and predictor. With ONNX Runtime as the engine
this needs no torch.
"""

from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd  # type: ignore[import-untyped]
from mlflow.pyfunc.model import PythonModel, PythonModelContext

from serve.packaged import list_plugin_files
from serve.predictor import Predictor
from serve.protocol.encoding import decode_cell
from serve.protocol.schemas import DEFAULT_TOP_K
from zoo.files.golden import read_bundle_card
from zoo.plugins import load_plugins
from zoo.preprocess import preprocess
from zoo.registry import registered


class BundleModel(PythonModel):
    """Answers a table with the one column `image`: encoded images as bytes, or as base64 text."""

    def load_context(self, context: PythonModelContext) -> None:
        """Load the bundle among the model's artifacts; MLflow wants the argument to have this name."""
        bundle = Path(context.artifacts["bundle"])
        card = read_bundle_card(bundle)
        if card.engine.name != "onnx" and card.attention not in registered():
            load_plugins(list_plugin_files(bundle))
        self.predictor = Predictor.from_bundle(bundle)

    def predict(
        self, context: PythonModelContext, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Answer every row of the table as `POST /invocations` does."""
        del context
        preprocessing = self.predictor.card.preprocessing
        images = [preprocess(decode_cell(cell), preprocessing) for cell in model_input["image"].tolist()]
        top_k = int((params or {}).get("top_k", DEFAULT_TOP_K))
        return [prediction.model_dump() for prediction in self.predictor.label(np.stack(images), top_k)]


mlflow.models.set_model(BundleModel())
