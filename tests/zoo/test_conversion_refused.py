"""What is not converted: each is one line that names it, and nothing is left behind."""

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import zoo
from tests.zoo.suites import Cosine
from tests.zoo.trained import bundle_of, load, make, timm_folder
from zoo import conversion
from zoo.bundle import WEIGHTS
from zoo.conversion import convert
from zoo.errors import BackboneError, BundleError, SwapError, UnknownNameError
from zoo.files import timm_folders

REFUSED: list[tuple[Callable[[Path], str | Path], str, type[Exception], str]] = [
    (lambda t: t / "none", "linear", BundleError, "none: nothing is there; wanted a bundle, a folder of timm's"),
    (lambda _: "local-dir:none", "linear", BackboneError, "no config.json in none"),
    (lambda t: t, "linear", BundleError, r"neither card\.json nor config\.json is there"),
    (lambda t: bundle_of(t / "b") / WEIGHTS, "linear", BundleError, "a file; wanted a bundle"),
    (lambda t: bundle_of(t / "b"), "linaer", UnknownNameError, "unknown attention 'linaer', did you mean 'linear'"),
    (lambda t: bundle_of(t / "b"), "tim", UnknownNameError, "did you mean 'timm'"),
    (lambda t: damaged(bundle_of(t / "b") / WEIGHTS), "timm", BundleError, r"model\.safetensors: truncated"),
    (lambda t: damaged(timm_folder(t / "b") / WEIGHTS), "linear", BackboneError, r"model\.safetensors: truncated"),
    (lambda t: step(t / "step-1"), "linear", BundleError, "a training's checkpoint; convert the bundle"),
    (lambda _: "vit_tiny_patch16_22", "timm", UnknownNameError, "did you mean 'vit_tiny_patch16_224'"),
    (
        lambda _: "test_vit4",
        "linear",
        BackboneError,
        "timm has no pretrained weights for it; add a tag",
    ),
    (
        lambda t: timm_folder(t / "b", num_classes=5),
        "linear",
        BundleError,
        "not all of it is trained: head: replaced, 3 -> 5",
    ),
]


def damaged(file: Path) -> Path:
    file.write_bytes(file.read_bytes()[:-10])
    return file.parent


def step(folder: Path) -> Path:
    folder.mkdir()
    (folder / "state.json").write_text("{}", encoding="utf-8")
    return folder


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("source", "attention", "error", "message"), REFUSED)
def test_what_cannot_be_converted_is_named_and_nothing_is_written(
    tmp_path: Path, source: Callable[[Path], str | Path], attention: str, error: type[Exception], message: str
) -> None:
    given = source(tmp_path)
    with pytest.raises(error, match=message) as caught:
        convert(given, tmp_path / "new", attention)
    assert "\n" not in str(caught.value)
    assert not [path for path in tmp_path.iterdir() if "new" in path.name]


def test_our_key_that_is_no_card_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"timm: backbone: Field required"):
        convert(timm_folder(tmp_path / "timm", attention_zoo={"format_version": 1}), tmp_path / "bundle", "linear")


def test_a_bundle_takes_no_class_names_and_a_folder_takes_as_many_as_it_has(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="a bundle has class names of its own"):
        convert(bundle_of(tmp_path / "b"), tmp_path / "new", "linear", class_names=["a", "b", "c"])
    with pytest.raises(BundleError, match="class_names: got 2, the model has 3 classes"):
        convert(timm_folder(tmp_path / "t"), tmp_path / "new", "linear", class_names=["a", "b"])
    with pytest.raises(BundleError, match="class names must be unique"):
        convert(timm_folder(tmp_path / "t2"), tmp_path / "new", "linear", class_names=["a", "b", "a"])


@pytest.mark.parametrize("attention", ["timm", "linear"])
@pytest.mark.parametrize("existing", ["folder", "file", "dangling"])
def test_nothing_is_overwritten(tmp_path: Path, attention: str, existing: str) -> None:
    target = tmp_path / "there"
    {"folder": Path.mkdir, "file": Path.touch, "dangling": lambda p: p.symlink_to("nowhere")}[existing](target)
    with pytest.raises(BundleError, match="there: exists already; nothing is overwritten"):
        convert(bundle_of(tmp_path / "b"), target, attention)
    assert os.path.lexists(target)
    assert target.is_symlink() == (existing == "dangling")


@contextmanager
def full_disk() -> Iterator[None]:
    """Let no file grow beyond 20 kB, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("attention", ["timm", "linear"])
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, attention: str) -> None:
    bundle_of(tmp_path / "b")
    with full_disk(), pytest.raises(BundleError, match=r"new: cannot be written \(.*\); nothing is left there"):
        convert(tmp_path / "b", tmp_path / "new", attention)
    assert names_in(tmp_path) == ["b"]


@pytest.mark.parametrize("attention", ["timm", "linear"])
def test_a_destination_that_cannot_be_made_is_one_line(tmp_path: Path, attention: str) -> None:
    bundle_of(tmp_path / "b")
    (tmp_path / "file").touch()
    with pytest.raises(BundleError, match=r"file/new: cannot be written \(Not a directory|file/new: cannot be written"):
        convert(tmp_path / "b", tmp_path / "file" / "new", attention)
    with pytest.raises(BundleError, match=r"/proc/new: cannot be written"):
        convert(tmp_path / "b", "/proc/new", attention)


def test_a_conversion_that_changes_the_function_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(model: nn.Module) -> None:
        zoo.restore_attention(model)
        nn.init.normal_(model.get_parameter("blocks.0.attn.qkv.weight"))

    monkeypatch.setattr(conversion, "restore_attention", forget)
    bundle_of(tmp_path / "b")
    with pytest.raises(SwapError, match=r"'linear' computes another function \(logits differ by"):
        convert(tmp_path / "b", tmp_path / "new", "timm")
    assert names_in(tmp_path) == ["b"]


def test_a_folder_that_timm_loads_otherwise_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose_a_bit(file: Path, state: dict[str, Tensor], **_: bool) -> dict[str, str]:
        wrong = {name: tensor.clone() for name, tensor in state.items()}
        wrong["norm.bias"][0] += 1e-6
        save_file(wrong, file)
        return {}

    monkeypatch.setattr(timm_folders, "write_tensors", lose_a_bit)
    bundle_of(tmp_path / "b")
    with pytest.raises(BundleError, match=r"new: timm loads another norm\.bias than was saved"):
        convert(tmp_path / "b", tmp_path / "new", "timm")
    assert names_in(tmp_path) == ["b"]


@pytest.mark.usefixtures("own_registry")
def test_attention_that_stock_timm_has_not_is_refused(tmp_path: Path) -> None:
    @zoo.register_attention("tempered")
    class Tempered(zoo.Attention):
        projection = "separate"

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.temperature = nn.Parameter(torch.ones(self.num_heads, 1, 1))

    bundle_of(tmp_path / "b", "tempered")
    with pytest.raises(SwapError, match=r"blocks\.0\.attn\.temperature is a parameter of Tempered alone"):
        convert(tmp_path / "b", tmp_path / "new", "timm")
    assert names_in(tmp_path) == ["b"]


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize("write", [bundle_of, timm_folder])
def test_a_variant_of_another_function_is_refused_and_can_be_trained_from_the_weights(
    tmp_path: Path, write: Callable[[Path], Path], images: Tensor
) -> None:
    zoo.register_attention("cosine")(Cosine)
    source = write(tmp_path / "b")
    with pytest.raises(SwapError, match=r"'cosine' computes another function \(logits differ by 0\.\d+\)") as caught:
        convert(source, tmp_path / "new", "cosine")
    way_out = (
        f"train it from these weights instead: --model.pretrained {source} --model.init null --model.attention cosine"
    )
    assert way_out in str(caught.value)
    assert "not the same weights" not in str(caught.value)
    assert names_in(tmp_path) == ["b"]
    bundle_of(tmp_path / "c", "cosine")
    for attention in ("timm", "linear"):
        with pytest.raises(SwapError, match=r"c: 'linear' computes another function"):
            convert(tmp_path / "c", tmp_path / "new", attention)
    assert names_in(tmp_path) == ["b", "c"]
    model = load(source, "cosine")  # what the way out does
    assert not torch.equal(model(images), make()(images))
    zoo.restore_attention(model)
    assert torch.equal(model(images), make()(images))
