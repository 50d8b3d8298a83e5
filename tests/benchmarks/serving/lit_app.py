"""A bare LitServe app on one of our bundles, for `compare.py`: base64 in JSON, our transform and engine.

python tests/benchmarks/serving/lit_app.py BUNDLE --port 8100 --max-batch 8
"""

import argparse
import base64
from pathlib import Path

import litserve
import numpy as np

from serve.predictor import Predictor
from zoo.preprocess import preprocess


class BundleAPI(litserve.LitAPI):
    """LitServe's four verbs, each a line."""

    def __init__(self, bundle: Path, max_batch: int) -> None:
        super().__init__(max_batch_size=max_batch, batch_timeout=0.002)
        self._bundle = bundle

    def setup(self, device: str) -> None:
        """Load the bundle in the worker's process."""
        del device
        self.predictor = Predictor.from_bundle(self._bundle)

    def decode_request(self, request: dict[str, str]) -> np.ndarray:
        """Decode the image in the worker."""
        return preprocess(base64.b64decode(request["image"]), self.predictor.card.preprocessing)

    def predict(self, batch: np.ndarray) -> np.ndarray:
        """Compute probabilities of (B, 3, height, width)."""
        return self.predictor.predict(np.asarray(batch))

    def encode_response(self, output: np.ndarray) -> dict[str, object]:
        """Name the five best."""
        (prediction,) = self.predictor.name_classes(np.asarray(output)[None])
        return {"predictions": [prediction.model_dump()]}


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--max-batch", type=int, default=8)
    given = parser.parse_args()
    server = litserve.LitServer(BundleAPI(given.bundle, given.max_batch), accelerator="cpu", timeout=60)
    server.run(port=given.port, host="127.0.0.1", generate_client_file=False, log_level="warning")


if __name__ == "__main__":
    main()
