"""Bundles: a model in a directory, as safetensors and JSON. Nothing in it can run code.

* `model.safetensors`: the state_dict; tied tensors once, their other names in the metadata.
* `card.json`: the ModelCard.
* `golden.safetensors`: one seeded input (1, 3, height, width) and its logits (1, K), for the load-test; in its
  metadata the SHA-256 of the other two files.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from zoo.card import ModelCard, read_card, write_card
from zoo.create import create_model
from zoo.errors import BundleError, ZooError
from zoo.files.bundle_files import CARD as CARD
from zoo.files.bundle_files import GOLDEN as GOLDEN
from zoo.files.bundle_files import WEIGHTS as WEIGHTS
from zoo.files.bundle_files import check_digests, digest, hint_inside, written_aside
from zoo.files.tensor_files import check_finite, find_misfits, list_names, read_tensors, read_tied, write_tensors
from zoo.files.ties import tie
from zoo.plugin_check import check_plugins

GOLDEN_TOLERANCE = 1e-3
"""Largest difference of golden logits, relative to the largest of them (at least 1).

Wide enough for another processor, thread count or TensorFloat-32, which move float32 logits by 1e-6 to 1e-4; a
wrong weight or a missing tie moves them by far more.
"""


def save_bundle(model: nn.Module, card: ModelCard, path: str | Path) -> None:
    """Write `model` as a bundle at `path`: all of it, proven to load and to answer the same, or nothing.

    The bundle is written beside `path`, flushed to disk, loaded back and checked, then renamed into place. The model
    keeps its device and mode, torch's random stream its state.

    Args:
        model: A model that `zoo.create_model` can rebuild from the card, in float32.
        card: What the model is.
        path: The bundle's directory; it must not exist yet. Its parents are made.

    Raises:
        BundleError: If `path` exists, or card and model do not fit; nothing is left at `path`.
    """
    path = Path(path)
    if path.exists():
        raise BundleError(f"{path}: exists already; bundles are never overwritten, remove it or choose another path")
    with written_aside(path) as aside:
        _write(model, card, aside)
        check_golden(load_bundle(aside)[0], aside)


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
    if not path.is_dir():
        raise BundleError(f"{path}: no bundle here, a directory with {CARD} and {WEIGHTS} is wanted")
    card = _read_card(path)
    tensors, ties = read_tied(path / WEIGHTS)
    read_golden(path, card)
    _check_card(path, card)
    with torch.device("meta"):  # a card may ask for any size: nothing is allocated before the weights fit it
        wanted = _build(path, card).state_dict()
    if misfits := find_misfits(tensors, wanted):
        raise BundleError(f"{path / WEIGHTS}: does not fit the card: {list_names(misfits, separator='; ')}")
    check_digests(path, read_tensors(path / GOLDEN)[1].get("sha256", ""))
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
    image, wanted = read_golden(path, _read_card(path))
    got = answer(model, image)
    if got.shape != wanted.shape:
        raise BundleError(f"{path / GOLDEN}: the logits have shape {tuple(wanted.shape)}, got {tuple(got.shape)}")
    try:
        return compare_logits(got, wanted)
    except BundleError as error:
        raise BundleError(f"{path / GOLDEN}: {error}") from error


def compare_logits(got: Tensor, wanted: Tensor) -> float:
    """Return the largest absolute difference; raise BundleError beyond `GOLDEN_TOLERANCE`, or if it is not finite."""
    difference = (got - wanted).abs().max().item()
    tolerance = GOLDEN_TOLERANCE * max(1.0, wanted.abs().max().item())
    if not difference <= tolerance:  # a NaN too
        raise BundleError(
            f"the model's logits differ by {difference:.3g} from those it was saved with, more than "
            f"{tolerance:.3g}: these are not the same weights, or not the same model"
        )
    return difference


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
    digests = json.dumps({name: digest(folder / name) for name in (WEIGHTS, CARD)})  # one key: safetensors shuffles
    save_file({"input": image, "logits": logits.contiguous()}, folder / GOLDEN, metadata={"sha256": digests})
    for name in (WEIGHTS, GOLDEN):
        shutil.copymode(folder / CARD, folder / name)  # safetensors writes for the owner alone, whatever the umask


def _read_card(path: Path) -> ModelCard:
    if not os.path.lexists(path / CARD):
        raise BundleError(f"{path}: no {CARD} in it: not a bundle{hint_inside(path)}")
    return read_card(path / CARD)


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


def read_golden(path: Path, card: ModelCard) -> tuple[Tensor, Tensor]:
    """Read the golden input (1, 3, height, width) and its logits (1, K), of the shapes that the card wants."""
    tensors, _ = read_tensors(path / GOLDEN)
    wanted = {"input": (1, 3, *card.preprocessing.size), "logits": (1, len(card.class_names))}
    for name, shape in wanted.items():
        got = tuple(tensors[name].shape) if name in tensors else "nothing"
        if got != shape:
            what = f"{len(card.class_names)} class_names" if name == "logits" else "preprocessing.size"
            raise BundleError(f"{path / GOLDEN}: {name}: got {got}, wanted {shape} by the card's {what}")
    return tensors["input"], tensors["logits"]


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
