"""Tiny models to try a variant on, and what `zoo.testing` does with them."""

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import zoo
from zoo.bundle import check_golden
from zoo.card import ModelCard, Preprocessing

TINY: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 3}
PLAIN = (("vit_tiny_patch16_224", TINY | {"attn_drop_rate": 0.1, "proj_drop_rate": 0.1}),)
"""timm's plain attention alone: what a whole-module variant can stand for."""

Backbones = tuple[tuple[str, Mapping[str, Any]], ...]
Pair = tuple[str, nn.Module, nn.Module, Tensor]


def through_bundle(model: nn.Module, backbone: str, attention: str, kwargs: Mapping[str, Any]) -> nn.Module:
    """Save a model as a bundle, load it back, and prove that it answers its golden example; return what came back."""
    size = int(kwargs.get("img_size", 224))
    card = ModelCard(
        backbone=backbone,
        timm_kwargs=json.loads(json.dumps({key: kwargs[key] for key in kwargs if key != "num_classes"})),
        attention=attention,
        plugins=zoo.plugin_sources(attention),
        class_names=tuple(map(str, range(kwargs["num_classes"]))),
        preprocessing=Preprocessing(size=(size, size), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)),
    )
    with TemporaryDirectory() as folder:
        zoo.save_bundle(model, card, Path(folder) / "bundle")
        loaded, _ = zoo.load_bundle(Path(folder) / "bundle")
        check_golden(loaded, Path(folder) / "bundle")
    return loaded


@torch.no_grad()
def disturb(model: nn.Module, *, seed: int) -> None:
    """Add a little to every parameter: zeros and ones (biases, layer scales) would hide a mistake."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)


def backward(model: nn.Module, images: Tensor, *, seed: int) -> Tensor:
    """Run one forward and backward pass, dropout drawn from `seed`; return the logits, (B, K)."""
    model.zero_grad(set_to_none=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # dropout's
        logits = model(images)
    assert isinstance(logits, Tensor)
    torch.autograd.backward(logits.square().sum())
    return logits.detach()


def step(model: nn.Module, images: Tensor) -> Tensor:
    """Take one step along the gradient in train mode; return the logits before it."""
    logits = backward(model.train(), images, seed=5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.01)
    return logits


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return all weights by names that stock and swapped model share: attention's by part, the rest as they are."""
    shown = zoo.attention_weights(model)
    rest = {
        name: tensor
        for name, tensor in model.named_parameters()
        if not any(name.startswith(f"{path}.") for path in shown)
    }
    parts = {f"{path} {part}": tensor for path, tensors in shown.items() for part, tensor in tensors.items()}
    return {name: tensor.detach() for name, tensor in (rest | parts).items()}


def share(module: nn.Module, other: nn.Module) -> None:
    """Make every parameter of `other` the one of the same name in `module`."""
    for name, parameter in module.named_parameters():
        owner, _, leaf = name.rpartition(".")
        setattr(other.get_submodule(owner), leaf, parameter)


def assert_clean(report: zoo.AuditReport, what: str) -> None:
    """Fail with what an audit found, notes apart."""
    found = [str(finding) for finding in report.findings if finding.severity != "note"]
    assert not found, f"{what}: the audit finds {'; '.join(found[:5])}"
