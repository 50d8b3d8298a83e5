"""What all ranks must agree on, collected on one of them: config, code, versions, data, checkpoint; gathers nothing.

Names are "kind: which", as `train.equality.agreement.check_agreement` takes them.
"""

import copy
import importlib.util
import platform
from collections import defaultdict
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import xxhash

from train.config import TrainConfig
from train.data import Data, TrainSet
from train.loaders import TrainBatches
from train.position import Position
from train.ranks import JsonValue
from train.tracking import flatten

_PACKAGES = ("zoo", "train", "serve")
_SOURCES = (".py", ".yaml", ".json")
_DISTRIBUTIONS = (
    *("attention-zoo", "torch", "torchvision", "timm", "accelerate", "einops", "safetensors", "numpy", "pillow"),
    *("pydantic", "mlflow"),
)
# Places on one's own machine, whose contents are compared by themselves, and what changes no number.
_OWN = ("data.root", "data.num_workers", "model.plugins", "model.pretrained", "log.")
_LOCAL = "local-dir:"


def start_facts(config: TrainConfig, environ: Mapping[str, str]) -> dict[str, JsonValue]:
    """Collect what a training starts from, but for data and weights; takes milliseconds.

    Args:
        config: The resolved config; its dump holds no password.
        environ: The process environment, in which a launcher leaves the world size it was asked for.

    Returns:
        Facts of the kinds config, version, code, torch, world and device; the last may differ.
    """
    return {
        **{f"config: {name}": value for name, value in _shared_fields(config).items()},
        "version: Python": platform.python_version(),
        **{f"version: {name}": _find_version(name) for name in _DISTRIBUTIONS},
        **{f"code: {name}": digest for name, digest in hash_sources().items()},
        **_torch_facts(),
        "world: WORLD_SIZE": environ.get("WORLD_SIZE"),
        "device: name": _name_device(),
    }


def data_facts(data: Data) -> dict[str, JsonValue]:
    """Collect what the data are: classes, counts, and names, labels and sizes of all files, hashed.

    Validation's bytes are left out: the main process alone reads them at the start.
    """
    facts: dict[str, JsonValue] = {
        "data: classes": len(data.class_names),
        "data: class names": xxhash.xxh3_64_hexdigest("\0".join(data.class_names).encode(errors="surrogateescape")),
        "data: training images": len(data.train),
        "data: validation images": len(data.val),
        "data: training files": data.train_fingerprint,
        "data: validation files": data.val.images.fingerprint(data.class_names, with_bytes=False),
    }
    for part, images in (("training", data.train.images), ("validation", data.val.images)):
        names: dict[int, list[str]] = defaultdict(list)
        for name, label in zip(images.names, images.labels, strict=True):
            names[label].append(name)
        for label, of_class in names.items():  # so that a message can say where to look
            digest = xxhash.xxh3_64_hexdigest("\0".join(of_class).encode(errors="surrogateescape"))
            facts[f"data: {part} class {data.class_names[label]}"] = f"{len(of_class)} images, names {digest[:8]}"
    return facts


def resume_facts(run_id: str | None, step: int, epoch: int, digest: str) -> dict[str, JsonValue]:
    """Collect which checkpoint a rank goes on from.

    Args:
        run_id: The MLflow run's, None for a new run.
        step: Optimizer steps done.
        epoch: Epochs done.
        digest: Hash of what the checkpoint holds, "" for a new run.
    """
    return {
        "checkpoint: run": run_id,
        "checkpoint: step": step,
        "checkpoint: epoch": epoch,
        "checkpoint: content": digest,
    }


def first_draws(data: Data, loader: TrainBatches, position: Position) -> dict[str, list[int | str]]:
    """Collect what no other rank may see or draw: the images of the next batch, and their augmentation's seeds.

    Args:
        data: The run's.
        loader: This rank's training batches; their position stays as it is.
        position: Where the batch starts.
    """
    sampler = copy.copy(loader.batch_sampler)
    sampler.set_position(*position)
    draws = next(iter(sampler))
    streams: dict[str, list[int | str]] = {"images of the first batch": [draw.image for draw in draws]}
    if isinstance(data.train, TrainSet):
        streams["augmentation of the first batch"] = [data.train.find_seed(draw) for draw in draws]
    return streams


def hash_sources() -> dict[str, str]:
    """Hash every source file of this product: "train/loop.py" to 16 hexadecimal digits."""
    found = {}
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)  # not imported: serve need not be loaded here
        for folder in spec.submodule_search_locations or () if spec else ():
            for path in sorted(Path(folder).rglob("*")):
                if path.suffix in _SOURCES:
                    name = f"{package}/{path.relative_to(folder).as_posix()}"
                    found[name] = xxhash.xxh3_64_hexdigest(path.read_bytes())
    return found


def _shared_fields(config: TrainConfig) -> dict[str, JsonValue]:
    fields: dict[str, JsonValue] = {
        name: value for name, value in flatten(config.model_dump(mode="json")).items() if not name.startswith(_OWN)
    }
    fields["model.pretrained"] = config.model.pretrained is not False
    if config.model.backbone.startswith(_LOCAL):
        fields["model.backbone"] = _LOCAL
    return fields


def _torch_facts() -> dict[str, JsonValue]:
    return {
        "torch: build": torch.__version__,
        "torch: CUDA": torch.version.cuda,
        "torch: cuDNN": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "torch: float32 matmul precision": torch.get_float32_matmul_precision(),
        "torch: TF32 in cuDNN": torch.backends.cudnn.allow_tf32,
        "torch: cuDNN benchmark": torch.backends.cudnn.benchmark,
        "torch: cuDNN deterministic": torch.backends.cudnn.deterministic,
        "torch: deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch: default dtype": str(torch.get_default_dtype()),
    }


def _name_device() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU with {torch.backends.cpu.get_cpu_capability()}"


def _find_version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
