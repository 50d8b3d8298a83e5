"""ONNX Runtime. Needs no torch, and runs no code of the bundle's."""

from pathlib import Path

import numpy as np
import onnxruntime  # type: ignore[import-untyped]
from numpy.typing import NDArray

from serve.engines.engine import EngineOptions, cut
from serve.engines.self_test import tell
from serve.errors import EngineError
from zoo.card import EngineChoice, ModelCard
from zoo.files.bundle_files import ONNX, read_digests
from zoo.files.golden import check_files, read_golden
from zoo.files.onnx_file import check_onnx

_CUDA, _CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
_ERRORS_ONLY = 3


class OnnxEngine:
    """A session of ONNX Runtime with the bundle's model.onnx."""

    def __init__(
        self, session: onnxruntime.InferenceSession, card: ModelCard, choice: EngineChoice, options: EngineOptions
    ) -> None:
        self.choice = choice
        self.device = "cuda" if session.get_providers()[0] == _CUDA else "cpu"
        self._session, self._size, self._max_batch = session, card.preprocessing.size, options.max_batch

    def run(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        """Compute the logits, (B, K), of preprocessed images, (B, 3, height, width)."""
        return np.concatenate(
            [self._session.run(["logits"], {"image": some})[0] for some in cut(images, self._max_batch)]
        )

    def warm_up(self) -> None:
        """Run one image and a full batch: the arena of memory has its size afterwards."""
        for count in (1, self._max_batch):
            self.run(np.zeros((count, 3, *self._size), dtype=np.float32))


def build_engine(bundle: Path, card: ModelCard, choice: EngineChoice, options: EngineOptions) -> OnnxEngine:
    """Open a session with the bundle's model.onnx, checked against its hash and for what it may hold.

    Raises:
        BundleError: If the bundle is damaged, or its model.onnx holds more than standard operators and numbers.
        EngineError: If the bundle has none, or ONNX Runtime cannot run it as asked.
    """
    if choice.precision != "fp32":
        raise EngineError(
            f"the engine onnx computes in fp32, and {choice.precision} was asked for: give --precision fp32, or the "
            "engine eager or compile"
        )
    check_files(bundle)
    if ONNX not in read_digests(read_golden(bundle, card).recorded):
        raise EngineError(
            f"{bundle}: no {ONNX} was saved with it, so the engine onnx cannot run it: give --engine eager, or make a "
            f"bundle that has one by python -m serve.equip {bundle} NEW --engine onnx"
        )
    content = check_onnx(bundle / ONNX)
    providers = _choose_providers(options.device)
    wanted = onnxruntime.SessionOptions()
    wanted.intra_op_num_threads, wanted.inter_op_num_threads = options.num_threads, 1
    wanted.log_severity_level = _ERRORS_ONLY
    wanted.add_session_config_entry("session.intra_op.allow_spinning", "0")  # idle threads sleep: their CPU is not ours
    try:
        session = onnxruntime.InferenceSession(content, wanted, providers=providers)  # bytes: as they were hashed
        names = [found.name for found in (*session.get_inputs(), *session.get_outputs())]
    except Exception as error:  # ONNX Runtime's errors derive from Exception alone
        raise EngineError(f"{bundle / ONNX}: ONNX Runtime cannot run it: {tell(error)}") from error
    if names != ["image", "logits"]:
        raise EngineError(f"{bundle / ONNX}: got inputs and outputs {', '.join(names)}, wanted image and logits")
    return OnnxEngine(session, card, choice, options)


def _choose_providers(device: str) -> list[str | tuple[str, dict[str, str]]]:
    has_cuda = _CUDA in onnxruntime.get_available_providers()
    if device == "cpu" or (device == "auto" and not has_cuda):
        return [_CPU]
    if not has_cuda:
        raise EngineError(
            f"device {device}: this onnxruntime {onnxruntime.__version__} runs on CPUs alone; install onnxruntime-gpu "
            "in its place, or give --device cpu, or the engine eager or compile"
        )
    return [(_CUDA, {"device_id": device.partition(":")[2] or "0"}), _CPU]
