"""Models whose every tensor has numbers of its own, and files of them. For the tests of what reads and writes files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import zoo
from zoo.bundle import save_bundle
from zoo.card import ModelCard, Preprocessing
from zoo.files.tensor_files import write_tensors
from zoo.pretrained import find_report

BACKBONE = "vit_tiny_patch16_224"
TINY: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
OTHER_SIZE = TINY | {"img_size": 48}
Prepare = Callable[[nn.Module], object]


def make(
    attention: str = "linear", backbone: str = BACKBONE, *, prepare: Prepare = nn.Module.eval, **kwargs: Any
) -> nn.Module:
    """Build a model whose every tensor has numbers of its own, the same function for every variant.

    `prepare` is called on the stock model before its attention is swapped.
    """
    model = zoo.create_model(backbone, seed=1, **({"num_classes": 3} | TINY | kwargs))
    draws = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draws) * 0.1)
    prepare(model)
    zoo.swap_attention(model, attention)
    return model.eval()


def saved(tmp_path: Path, attention: str = "linear", **kwargs: Any) -> Path:
    write_tensors(tmp_path / "weights.safetensors", make(attention, **kwargs).state_dict())
    return tmp_path / "weights.safetensors"


def load(path: Path | str, attention: str = "linear", backbone: str = BACKBONE, **kwargs: Any) -> nn.Module:
    model = zoo.create_model(backbone, attention, pretrained=path, seed=3, **({"num_classes": 3} | TINY | kwargs))
    return model.eval()


def adapted(model: nn.Module) -> tuple[str, ...]:
    report = find_report(model)
    assert report is not None
    return report.adapted


def card_of(attention: str, **fields: Any) -> ModelCard:
    look = Preprocessing(size=(32, 32), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    known = {"backbone": BACKBONE, "timm_kwargs": TINY, "class_names": ("ash", "日本 語", "oak"), "preprocessing": look}
    return ModelCard.model_validate(known | {"attention": attention} | fields)


def bundle_of(path: Path, attention: str = "parameter", prepare: Prepare = nn.Module.eval, **fields: Any) -> Path:
    card = card_of(attention, **fields)
    save_bundle(make(attention, card.backbone, prepare=prepare), card, path)
    return path


def timm_folder(folder: Path, **config: Any) -> Path:
    """Write a folder as others write it: no key of ours, a configuration that holds what it must."""
    folder.mkdir()
    save_file(make().state_dict(), folder / "model.safetensors")
    known = {"architecture": BACKBONE, "model_args": TINY, "num_classes": 3}
    known |= {"pretrained_cfg": {"input_size": [3, 32, 32], "mean": [0.5] * 3, "std": [0.5] * 3, "classifier": "head"}}
    (folder / "config.json").write_text(json.dumps(known | config), encoding="utf-8")
    return folder


def change(file: Path, **tensors: Tensor | None) -> Path:
    state = {name: tensor.clone() for name, tensor in load_file(file).items()}
    for name, tensor in tensors.items():
        if tensor is None:
            del state[name]
        else:
            state[name] = tensor
    save_file(state, file)
    return file


def checkpoint(folder: Path, attention: str) -> Path:
    folder.mkdir()
    config = {"model.backbone": BACKBONE, "model.attention": attention}
    config |= {f"model.timm_kwargs.{key}": value for key, value in TINY.items()}
    (folder / "state.json").write_text(json.dumps({"config": config}), encoding="utf-8")
    write_tensors(folder / "model.safetensors", make(attention).state_dict())
    return folder
