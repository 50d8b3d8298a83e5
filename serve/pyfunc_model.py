"""The MLflow model's code: a bundle behind MLflow's own tools. MLflow runs this file; nothing here imports it.

The numbers are the endpoint's own: the same decoding, transform and predictor.
"""

from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd  # type: ignore[import-untyped]
from mlflow.pyfunc.model import PythonModel, PythonModelContext

from serve.package import PLUGINS
from serve.predictor import Predictor
from serve.protocol.encoding import decode_cell
from serve.protocol.schemas import DEFAULT_TOP_K
from zoo.bundle import CARD
from zoo.card import read_card
from zoo.plugins import load_plugins
from zoo.preprocess import preprocess
from zoo.registry import registered


class BundleModel(PythonModel):
    """Answers a table with the one column `image`: encoded images as bytes, or as base64 text."""

    def load_context(self, context: PythonModelContext) -> None:
        """Load the bundle among the model's artifacts; MLflow wants the argument to have this name."""
        bundle = Path(context.artifacts["bundle"])
        if read_card(bundle / CARD).attention not in registered():  # its plugin lies among the model's code
            load_plugins(sorted((bundle.parent.parent / "code" / PLUGINS).glob("*.py")))
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
