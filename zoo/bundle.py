"""Bundles: a model in a directory, as safetensors and JSON. Nothing in it can run code.

* `model.safetensors`: the state_dict; tied tensors once, their other names in the metadata.
* `card.json`: the ModelCard.
* `model.onnx`: the same function for ONNX Runtime, where the card's engine is that.
* `golden.safetensors`: one seeded input (1, 3, height, width) and its logits (1, K), for the load-test; in its
  metadata the SHA-256 of the other files.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo.card import ModelCard, write_card
from zoo.create import create_model
from zoo.errors import BundleError, ZooError
from zoo.files.bundle_files import CARD as CARD
from zoo.files.bundle_files import GOLDEN as GOLDEN
from zoo.files.bundle_files import ONNX as ONNX
from zoo.files.bundle_files import WEIGHTS as WEIGHTS
from zoo.files.bundle_files import check_digests, written_aside
from zoo.files.golden import GOLDEN_TOLERANCE as GOLDEN_TOLERANCE
from zoo.files.golden import compare_logits as compare_arrays
from zoo.files.golden import read_bundle_card, read_golden, write_golden
from zoo.files.onnx_export import check_exportable, export_onnx
from zoo.files.tensor_files import check_finite, find_misfits, list_names, read_tied, write_tensors
from zoo.files.ties import tie
from zoo.plugin_check import check_plugins

Proof = Callable[[Path, nn.Module], Mapping[str, float]]
"""What `save_bundle` asks of a bundle before it gets its name, from its folder and its model, in eval mode on the CPU:
raise BundleError if it must not be; return metrics that its card is to have besides."""


def save_bundle(model: nn.Module, card: ModelCard, path: str | Path, *, prove: Proof | None = None) -> None:
    """Write `model` as a bundle at `path`: all of it, proven to load and to answer the same, or nothing.

    The bundle is written beside `path`, flushed to disk, loaded back and checked, then renamed into place. The model
    keeps its device and mode, torch's random stream its state. Where the card's engine is "onnx", model.onnx is
    exported from the model that was loaded back; that ONNX Runtime computes the same with it, `prove` has to say.

    Args:
        model: A model that `zoo.create_model` can rebuild from the card, in float32.
        card: What the model is.
        path: The bundle's directory; it must not exist yet. Its parents are made.
        prove: A last check of the whole bundle, and metrics for its card.

    Raises:
        BundleError: If `path` exists, or card and model do not fit; nothing is left at `path`.
        ExportError: If the model cannot be exported.
    """
    path = Path(path)
    if path.exists():
        raise BundleError(f"{path}: exists already; bundles are never overwritten, remove it or choose another path")
    if card.engine.name == "onnx":
        check_exportable(model)
    with written_aside(path) as aside:
        _write(model, card, aside)
        loaded, _ = load_bundle(aside)
        check_golden(loaded, aside)
        golden = read_golden(aside, card)
        if card.engine.name == "onnx":
            export_onnx(loaded, card.preprocessing.size, aside / ONNX)
            shutil.copymode(aside / CARD, aside / ONNX)
            write_golden(aside, golden.image, golden.logits)
        if prove is not None and (metrics := prove(aside, loaded)):
            write_card(card.model_copy(update={"metrics": {**card.metrics, **metrics}}), aside / CARD)
            write_golden(aside, golden.image, golden.logits)


def load_bundle(path: str | Path) -> tuple[nn.Module, ModelCard]:
    """Rebuild the model of the bundle at `path`.

    Args:
        path: A directory that `save_bundle` wrote.

    Returns:
        The model, on the CPU, in eval mode; and its card. Use `check_golden` to prove that it answers as it did.

    Raises:
        BundleError: If anything is missing, damaged or does not fit; the message names file and tensor.
    """
    path = Path(path)
    card = read_bundle_card(path)
    tensors, ties = read_tied(path / WEIGHTS)
    golden = read_golden(path, card)
    _check_card(path, card)
    with torch.device("meta"):  # a card may ask for any size: nothing is allocated before the weights fit it
        wanted = _build(path, card).state_dict()
    if misfits := find_misfits(tensors, wanted):
        raise BundleError(f"{path / WEIGHTS}: does not fit the card: {list_names(misfits, separator='; ')}")
    check_digests(path, golden.recorded)
    check_finite(path / WEIGHTS, tensors)
    model = _build(path, card)
    try:
        tie(model, ties)
    except ValueError as error:
        raise BundleError(f"{path / WEIGHTS}: {error}") from error
    model.load_state_dict(tensors, strict=True)
    return model.eval(), card


def check_golden(model: nn.Module, path: str | Path) -> float:
    """Ask `model` the golden input of the bundle at `path` and compare its logits.

    Args:
        model: The bundle's model, on any device, in any mode; both stay.
        path: The bundle.

    Returns:
        The largest absolute difference of the logits.

    Raises:
        BundleError: If the difference is beyond `GOLDEN_TOLERANCE`, or not finite.
    """
    path = Path(path)
    golden = read_golden(path, read_bundle_card(path))
    got, wanted = answer(model, torch.from_numpy(golden.image)), torch.from_numpy(golden.logits)
    if got.shape != wanted.shape:
        raise BundleError(f"{path / GOLDEN}: the logits have shape {tuple(wanted.shape)}, got {tuple(got.shape)}")
    try:
        return compare_logits(got, wanted)
    except BundleError as error:
        raise BundleError(f"{path / GOLDEN}: {error}") from error


def compare_logits(got: Tensor, wanted: Tensor) -> float:
    """Return the largest absolute difference; raise BundleError beyond `GOLDEN_TOLERANCE`, or if it is not finite."""
    return compare_arrays(got.numpy(), wanted.numpy())


def ask_golden(model: nn.Module, card: ModelCard) -> tuple[Tensor, Tensor]:
    """Return the golden input of the card's size, (1, 3, height, width), and the model's logits for it, (1, K).

    Raises:
        BundleError: If the model refuses an input of that size.
    """
    image = torch.randn((1, 3, *card.preprocessing.size), generator=torch.Generator().manual_seed(0))
    try:
        return image, answer(model, image)
    except (AssertionError, RuntimeError, ValueError) as error:
        raise BundleError(
            f"the model refuses an input of {tuple(image.shape)}, the card's preprocessing.size: {error}"
        ) from error


def _write(model: nn.Module, card: ModelCard, folder: Path) -> None:
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for name, tensor in state.items():
        if tensor.is_floating_point() and tensor.dtype != torch.float32:
            raise BundleError(f"{folder}: {name} is {tensor.dtype}; bundles hold float32, save model.float()")
    check_finite(folder, state)
    try:
        write_tensors(folder / WEIGHTS, state)
    except ValueError as error:
        raise BundleError(f"{folder}: {error}") from error
    write_card(card, folder / CARD)
    try:
        image, logits = ask_golden(model, card)
    except BundleError as error:
        raise BundleError(f"{folder}: {error}") from error
    shutil.copymode(folder / CARD, folder / WEIGHTS)  # safetensors writes for the owner alone, whatever the umask
    write_golden(folder, image.numpy(), logits.numpy())


def _check_card(path: Path, card: ModelCard) -> None:
    if card.attention_options:
        raise BundleError(f"{path / CARD}: attention_options: {card.attention!r} takes none here")
    check_plugins(card, path / CARD)


def _build(path: Path, card: ModelCard) -> nn.Module:
    kwargs: dict[str, Any] = {**card.timm_kwargs, "num_classes": len(card.class_names)}
    try:
        # The seed keeps the caller's random stream as it is; every weight is replaced.
        return create_model(card.backbone, card.attention, seed=0, **kwargs)
    except ZooError as error:
        raise BundleError(f"{path / CARD}: cannot build the model: {error}") from error


@torch.no_grad()
def answer(model: nn.Module, image: Tensor) -> Tensor:
    """Return the logits on the CPU, asked in eval mode without autocast."""
    device = next(model.parameters()).device
    with _eval_mode(model), torch.autocast(device.type, enabled=False):
        logits = model(image.to(device))
    assert isinstance(logits, Tensor)
    return logits.float().cpu()


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Put every module in eval mode, and each back in its own afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
