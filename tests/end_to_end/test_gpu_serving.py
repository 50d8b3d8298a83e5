"""The engines' paths that only a GPU takes: pinned memory, autocast, CUDA graphs, ONNX Runtime's CUDA provider."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

import zoo
from serve.engines.eager import EagerEngine
from serve.engines.engine import Engine, EngineOptions
from serve.engines.opening import open_engine
from serve.equip.write import equip
from zoo.card import EngineChoice, ModelCard, Preprocessing
from zoo.files.golden import read_bundle_card

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2}
GPU = EngineOptions(device="cuda", max_batch=8)
COUNTS = (1, 2, 3, 5, 8, 11)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    look = Preprocessing(size=(32, 32), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    names = {"backbone": "vit_tiny_patch16_224", "attention": "parameter"}
    card = ModelCard(**names, timm_kwargs=dict(SMALL), class_names=("ash", "elm", "oak"), preprocessing=look)
    path = tmp_path_factory.mktemp("gpu") / "bundle"
    zoo.save_bundle(zoo.create_model(*names.values(), seed=1, num_classes=3, **SMALL), card, path)
    return path


def batch(count: int) -> np.ndarray:
    return np.random.default_rng(count).standard_normal((count, 3, 32, 32), dtype=np.float32)


def start(bundle: Path, choice: EngineChoice) -> Engine:
    engine, _ = open_engine(bundle, read_bundle_card(bundle), choice=choice, options=GPU)
    engine.warm_up()
    return engine


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-3), ("bf16", 5e-2)])
@pytest.mark.parametrize("name", ["eager", "compile"])
def test_a_gpu_gives_the_cpus_logits_at_every_batch_size(
    bundle: Path, name: str, precision: str, tolerance: float
) -> None:
    on_cpu, _ = open_engine(bundle, read_bundle_card(bundle), options=EngineOptions(device="cpu"))
    on_gpu = start(bundle, EngineChoice(name=name, precision=precision))
    assert on_gpu.device == "cuda"
    for _ in range(2):  # a graph that is replayed answers for the new images
        for count in COUNTS:
            np.testing.assert_allclose(on_gpu.run(batch(count)), on_cpu.run(batch(count)), rtol=0, atol=tolerance)


def test_images_wait_in_pinned_memory(bundle: Path) -> None:
    engine = start(bundle, EngineChoice())
    assert isinstance(engine, EagerEngine)
    assert engine._staged is not None
    assert engine._staged.is_pinned()


def test_no_request_waits_for_a_compiler_or_a_recording(bundle: Path) -> None:
    from torch._dynamo.utils import counters

    engine = start(bundle, EngineChoice(name="compile"))
    made, skipped = counters["stats"]["unique_graphs"], counters["inductor"]["cudagraph_skips"]
    for count in COUNTS:
        engine.run(batch(count))
    assert counters["stats"]["unique_graphs"] == made
    assert (skipped, counters["inductor"]["cudagraph_skips"]) == (0, 0)


@pytest.mark.skipif(
    "CUDAExecutionProvider" not in onnxruntime.get_available_providers(), reason="needs onnxruntime-gpu"
)
def test_onnx_runtime_on_a_gpu_gives_the_cpus_logits(bundle: Path, tmp_path: Path) -> None:
    equip(bundle, tmp_path / "onnx", EngineChoice(name="onnx"))
    card = read_bundle_card(tmp_path / "onnx")
    on_gpu, difference = open_engine(tmp_path / "onnx", card, options=GPU)
    assert (on_gpu.device, difference < 1e-3) == ("cuda", True)
