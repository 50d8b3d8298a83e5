"""A registry with versions to move between, and a server that follows them, all in this process."""

import asyncio
import io
import itertools
import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import mlflow
import numpy as np
import pytest
import torch
from fastapi import FastAPI
from mlflow.tracking import MlflowClient
from PIL import Image

import zoo
from serve.app import create_app
from serve.models import registry
from serve.models.uris import FoundVersion
from serve.settings import Settings
from tests.serve.models.stand import Stand
from zoo.card import ModelCard, Preprocessing


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def other_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that differs from `bundle` in classes, input size and attention."""
    kwargs = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
    card = ModelCard(
        backbone="vit_tiny_patch16_224",
        timm_kwargs=dict(kwargs),
        attention="linear",
        class_names=("cat", "dog"),
        preprocessing=Preprocessing(size=(16, 16), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)),
    )
    path = tmp_path_factory.mktemp("bundles") / "other"
    zoo.save_bundle(zoo.create_model("vit_tiny_patch16_224", "linear", seed=3, num_classes=2, **kwargs), card, path)
    return path


LABELS = {frozenset({"日本 語", "é", "ash"}), frozenset({"cat", "dog"})}


@dataclass(frozen=True)
class Registered:
    """A registered model of a test's own, its alias `champion`, and how to add versions."""

    name: str

    @property
    def uri(self) -> str:
        return f"models:/{self.name}@champion"

    def add(self, bundle: Path) -> str:
        """Register a bundle's files as they are, as log_bundle would lay them out but in a tenth of its time."""
        with mlflow.start_run() as run:
            mlflow.log_artifacts(str(bundle), "model/artifacts/bundle")
        source = f"{run.info.artifact_uri}/model"
        return str(MlflowClient().create_model_version(self.name, source, run.info.run_id).version)

    def point(self, version: str) -> None:
        MlflowClient().set_registered_model_alias(self.name, "champion", version)


_NUMBERS = itertools.count()


@pytest.fixture
def registered_model(store: str, bundle: Path) -> Registered:
    """A model whose version 1 is `bundle`, under the alias."""
    assert store
    mlflow.set_experiment("zoo")
    model = Registered(f"followed{next(_NUMBERS)}")
    MlflowClient().create_registered_model(model.name)
    model.point(model.add(bundle))
    return model


@pytest.fixture
def damage(bundle: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Copies `bundle` with one fault of several kinds."""

    def copy(kind: str) -> Path:
        path = tmp_path / "damaged"
        shutil.copytree(bundle, path)
        FAULTS[kind](path)
        return path

    return copy


def _flip_a_byte(path: Path) -> None:
    content = bytearray((path / "model.safetensors").read_bytes())
    content[-5] ^= 1
    (path / "model.safetensors").write_bytes(content)


def _answer_otherwise(path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(path / "golden.safetensors", framework="pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    save_file(tensors | {"logits": tensors["logits"] + 1}, path / "golden.safetensors", metadata=metadata)


def _write_card(path: Path, **fields: Any) -> None:
    card = json.loads((path / "card.json").read_text(encoding="utf-8")) | fields
    (path / "card.json").write_text(json.dumps(card), encoding="utf-8")


def _want_onnx(path: Path) -> None:
    model, card = zoo.load_bundle(path)
    shutil.rmtree(path)
    zoo.save_bundle(model, card, path)
    _write_card(path, engine={"name": "onnx", "precision": "fp32"})
    _sign(path)


def _sign(path: Path) -> None:
    """Write the hashes anew, as if the bundle had been saved like this."""
    import hashlib

    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(path / "golden.safetensors", framework="pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    names = json.loads(metadata["sha256"])
    digests = {name: hashlib.sha256((path / name).read_bytes()).hexdigest() for name in names}
    save_file(tensors, path / "golden.safetensors", metadata=metadata | {"sha256": json.dumps(digests)})


FAULTS: dict[str, Callable[[Path], None]] = {
    "flipped byte": _flip_a_byte,
    "other answer": _answer_otherwise,
    "newer format": lambda path: _write_card(path, format_version=99),
    "no model.onnx": _want_onnx,
    "no card": lambda path: (path / "card.json").unlink(),
}


@dataclass(frozen=True)
class Running:
    """An application that has begun, and a client for it."""

    app: FastAPI
    client: httpx.AsyncClient

    async def ask(self) -> tuple[int, str, frozenset[str]]:
        """Send an image; return status, version and the classes that the answer names."""
        answer = await self.client.post("/invocations", content=IMAGE, headers={"content-type": "image/png"})
        if answer.status_code != 200:
            return answer.status_code, "", frozenset()
        labels = frozenset(score["label"] for score in answer.json()["predictions"][0]["top"])
        return 200, answer.headers["x-model-version"], labels

    async def get_version(self) -> dict[str, Any]:
        answer = await self.client.get("/version")
        return answer.json()["model"] if answer.status_code == 200 else {}

    async def serves(self, version: str) -> None:
        """Wait until this version answers."""
        async with asyncio.timeout(60):
            while (await self.get_version()).get("version") != version:
                await asyncio.sleep(0.01)

    def count(self, sample: str, **labels: str) -> float:
        return self.app.state.metrics.registry.get_sample_value(sample, labels) or 0.0


def _draw() -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


IMAGE = _draw()


@pytest.fixture
def run_server() -> Callable[..., Any]:
    """Begin an application, as a context: `async with run_server(uri, poll_interval_s=0.01) as running`."""
    torch.set_num_threads(1)

    @asynccontextmanager
    async def run(*uris: str, **settings: Any) -> AsyncIterator[Running]:
        failures: list[Exception] = []
        given = {"model_uri": uris, "poll_interval_s": 0.02, "threads": 1, "access_log": False} | settings
        app = create_app(Settings(**given), on_failure=failures.append)
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                yield Running(app, client)
        assert failures == []

    return run


@pytest.fixture
async def stand(registered_model: Any, tmp_path: Path) -> Any:
    (tmp_path / "downloads").mkdir()
    stand = await Stand(registered_model.uri, tmp_path / "downloads").start()
    yield stand
    await stand.shelf.close()
    assert list((tmp_path / "downloads").iterdir()) == []  # disk is bounded: nothing stays once it is loaded


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The versions that were downloaded."""
    fetched: list[str] = []
    real = registry.fetch_version

    def fetch(uri: Any, found: FoundVersion, into: Path) -> Any:
        fetched.append(found.version)
        return real(uri, found, into)

    monkeypatch.setattr(registry, "fetch_version", fetch)
    return fetched
