"""What is served in the benchmarks: ViT-tiny/16 at 224 pixels with drawn weights, as a bundle and as a version."""

from pathlib import Path

import mlflow

import zoo
from serve.package import log_bundle
from zoo.card import EngineChoice, ModelCard, Preprocessing

NAME = "subject"


def write_bundle(path: Path, engine: EngineChoice, *, seed: int = 0, num_classes: int = 1000) -> Path:
    """Write a bundle whose answers differ from photograph to photograph; return its directory."""
    card = ModelCard(
        backbone="vit_tiny_patch16_224",
        attention="parameter",
        engine=engine,
        class_names=tuple(f"class {i}" for i in range(num_classes)),
        preprocessing=Preprocessing(size=(224, 224), crop_pct=0.9, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)),
    )
    model = zoo.create_model(card.backbone, card.attention, init="torch", seed=seed, num_classes=num_classes)
    zoo.save_bundle(model, card, path)
    return path


def register(bundle: Path, folder: Path) -> tuple[str, str]:
    """Register the bundle in a store of its own below `folder`; return the version's URI and the store's."""
    store = f"sqlite:///{folder}/mlflow.db"
    mlflow.set_tracking_uri(store)
    if mlflow.get_experiment_by_name("benchmark") is None:
        mlflow.create_experiment("benchmark", artifact_location=str(folder / "artifacts"))
    mlflow.set_experiment("benchmark")
    with mlflow.start_run():
        version = mlflow.register_model(log_bundle(bundle), NAME).version
    return f"models:/{NAME}/{version}", store
