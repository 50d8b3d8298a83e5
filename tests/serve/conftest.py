import base64
import io
import threading
from collections.abc import Iterator
from pathlib import Path

import mlflow
import numpy as np
import pytest
import torch
from mlflow.tracking import MlflowClient
from numpy.typing import NDArray
from PIL import Image
from starlette.testclient import TestClient

import zoo
import zoo.projections  # the built-in variants are there before a test changes the registry
from serve.app import create_app
from serve.engines.eager import EagerEngine
from serve.equip.write import equip
from serve.package import log_bundle
from serve.predictor import Predictor
from serve.settings import Settings
from zoo import plugins, registry
from zoo.card import EngineChoice, ModelCard, Preprocessing

KWARGS = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with class names outside ASCII, whose answers differ from image to image."""
    model = zoo.create_model("vit_tiny_patch16_224", "parameter", seed=1, num_classes=3, **KWARGS)
    stream = torch.Generator().manual_seed(2)
    with torch.no_grad():  # timm starts biases at zero and weights small: every image would look alike
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=stream) * 0.2)
    card = ModelCard(
        backbone="vit_tiny_patch16_224",
        timm_kwargs=dict(KWARGS),
        attention="parameter",
        class_names=("日本 語", "é", "ash"),
        preprocessing=Preprocessing(size=(32, 32), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)),
    )
    path = tmp_path_factory.mktemp("bundles") / "tiny"
    zoo.save_bundle(model, card, path)
    return path


@pytest.fixture(scope="session")
def onnx_bundle(bundle: Path) -> Path:
    """The same model with ONNX Runtime as its engine; exporting it takes seconds."""
    path = bundle.with_name("tiny_onnx")
    equip(bundle, path, EngineChoice(name="onnx"))
    return path


PLUGIN = """import zoo
from zoo.projections import SeparateProjection

@zoo.register_attention("mine")
class Mine(SeparateProjection):
    pass
"""


@pytest.fixture
def own_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test load plugins that are gone when it ends."""
    monkeypatch.setattr(registry, "_ATTENTIONS", dict(registry._ATTENTIONS))
    monkeypatch.setattr(plugins, "_LOADED", [])
    monkeypatch.setenv("ZOO_PLUGIN_FILES", "[]")


@pytest.fixture(scope="session")
def plugin_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose attention is that of my_attention.py beside it; the file is not loaded."""
    folder = tmp_path_factory.mktemp("plugged")
    (folder / "my_attention.py").write_text(PLUGIN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_ATTENTIONS", dict(registry._ATTENTIONS))
        patch.setattr(plugins, "_LOADED", [])
        patch.setenv("ZOO_PLUGIN_FILES", "[]")
        zoo.load_plugins(folder / "my_attention.py")
        card = ModelCard(
            backbone="vit_tiny_patch16_224",
            timm_kwargs=dict(KWARGS),
            attention="mine",
            plugins=zoo.plugin_sources("mine"),
            class_names=("ash", "elm", "oak"),
            preprocessing=Preprocessing(size=(32, 32), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)),
        )
        model = zoo.create_model("vit_tiny_patch16_224", "mine", seed=1, num_classes=3, **KWARGS)
        zoo.save_bundle(model, card, folder / "bundle")
    return folder / "bundle"


@pytest.fixture(scope="session")
def plugin_onnx_bundle(plugin_bundle: Path) -> Path:
    """The same with ONNX Runtime as its engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_ATTENTIONS", dict(registry._ATTENTIONS))
        patch.setattr(plugins, "_LOADED", [])
        patch.setenv("ZOO_PLUGIN_FILES", "[]")
        zoo.load_plugins(plugin_bundle.parent / "my_attention.py")
        equip(plugin_bundle, plugin_bundle.with_name("onnx"), EngineChoice(name="onnx"))
    return plugin_bundle.with_name("onnx")


@pytest.fixture(scope="session")
def predictor(bundle: Path) -> Predictor:
    return Predictor.from_bundle(bundle, name="数字 model", version="7")


@pytest.fixture
def settings() -> Settings:
    return Settings(max_body_bytes=200_000, max_pixels=10_000, max_images=4)


@pytest.fixture
def client(settings: Settings, predictor: Predictor) -> Iterator[TestClient]:
    with TestClient(create_app(settings, predictor), raise_server_exceptions=False) as client:
        yield client


@pytest.fixture(scope="session")
def images() -> list[bytes]:
    """Three different PNG files."""
    files = []
    for i in range(3):
        pixels = np.random.default_rng(i).integers(0, 256, (40, 50, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        files.append(file.getvalue())
    return files


@pytest.fixture(scope="session")
def texts(images: list[bytes]) -> list[str]:
    """The same files as base64."""
    return [base64.b64encode(image).decode() for image in images]


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An MLflow store of its own, as the process's default while these tests run."""
    folder = tmp_path_factory.mktemp("store")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    mlflow.create_experiment("zoo", artifact_location=str(folder / "artifacts"))
    yield mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(before)


@pytest.fixture(scope="session")
def registered(store: str, bundle: Path) -> str:
    """The tiny bundle as version 1 of the model `tiny`."""
    assert mlflow.get_tracking_uri() == store
    mlflow.set_experiment("zoo")
    with mlflow.start_run():
        version = mlflow.register_model(log_bundle(bundle), "tiny").version
    MlflowClient().set_registered_model_alias("tiny", "champion", version)
    return f"models:/tiny/{version}"


class Gate(threading.Event):
    """What engines wait for; `entered` is set once one does."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()


@pytest.fixture
def shut_engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """An event for which every engine waits before it computes; set, they go on."""
    gate, run = Gate(), EagerEngine.run

    def wait(engine: EagerEngine, images: NDArray[np.float32]) -> NDArray[np.float32]:
        gate.entered.set()
        assert gate.wait(60)
        return run(engine, images)

    monkeypatch.setattr(EagerEngine, "run", wait)
    yield gate
    gate.set()
