"""Bundles: what is saved comes back, and what would not is not saved."""

import errno
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import zoo
from tests.zoo.trained import TINY, bundle_of, card_of, make
from zoo.bundle import CARD, GOLDEN, WEIGHTS, check_golden, load_bundle, save_bundle
from zoo.card import Preprocessing
from zoo.errors import BundleError
from zoo.files import golden, tensor_files


@pytest.mark.parametrize("attention", zoo.list_attentions())
def test_a_bundle_gives_back_the_model_bit_for_bit(tmp_path: Path, attention: str) -> None:
    model, card = make(attention).train(), card_of(attention)
    save_bundle(model, card, tmp_path / "new" / "bundle")
    loaded, its_card = load_bundle(tmp_path / "new" / "bundle")
    assert its_card == card
    assert not any(module.training for module in loaded.modules())
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    assert check_golden(loaded, tmp_path / "new" / "bundle") == 0.0
    assert sorted(file.name for file in (tmp_path / "new" / "bundle").iterdir()) == [CARD, GOLDEN, WEIGHTS]


def test_a_path_may_be_text(tmp_path: Path) -> None:
    model, path = make("parameter"), str(tmp_path / "bundle")
    save_bundle(model, card_of("parameter"), path)
    assert check_golden(load_bundle(path)[0], path) == 0.0
    with pytest.raises(BundleError, match="exists already"):
        save_bundle(model, card_of("parameter"), path)


def test_raw_matrices_keep_their_names_in_the_file(bundle: Path) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(bundle / WEIGHTS).items()}
    raw = [name for name in shapes if name.startswith("blocks.0.attn.") and shapes[name] == (32, 32)]
    assert [name.rpartition(".")[2] for name in sorted(raw)] == ["projection", "to_k", "to_q", "to_v"]


def test_the_golden_example_is_the_same_every_time(bundle: Path, tmp_path: Path) -> None:
    bundle_of(tmp_path / "again")
    for name in (WEIGHTS, CARD, GOLDEN):
        assert (bundle / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_saving_and_loading_leave_modes_and_random_stream_alone(tmp_path: Path) -> None:
    model, card = make("parameter"), card_of("parameter")
    model.train()
    model.get_submodule("blocks.1").eval()
    modes = [module.training for module in model.modules()]
    stream = torch.get_rng_state()
    save_bundle(model, card, tmp_path / "bundle")
    load_bundle(tmp_path / "bundle")
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), stream)


def test_others_may_read_a_bundle(bundle: Path) -> None:
    for file in (bundle, *bundle.iterdir()):
        assert file.stat().st_mode & stat.S_IROTH, file


def test_tied_weights_are_stored_once_and_come_back_tied(tmp_path: Path) -> None:
    model, card = make("parameter"), card_of("parameter")
    first, second = model.get_submodule("blocks.0.mlp.fc1"), model.get_submodule("blocks.1.mlp.fc1")
    second.weight = first.weight
    save_bundle(model, card, tmp_path / "bundle")
    assert "blocks.1.mlp.fc1.weight" not in load_file(tmp_path / "bundle" / WEIGHTS)
    with safe_open(tmp_path / "bundle" / WEIGHTS, framework="pt") as opened:
        assert "blocks.1.mlp.fc1.weight" in opened.metadata()["ties"]
    loaded, _ = load_bundle(tmp_path / "bundle")
    assert loaded.get_parameter("blocks.1.mlp.fc1.weight") is loaded.get_parameter("blocks.0.mlp.fc1.weight")
    assert torch.equal(loaded.get_parameter("blocks.1.mlp.fc1.weight"), first.weight)
    assert check_golden(loaded, tmp_path / "bundle") == 0.0


def test_an_existing_path_is_left_as_it_is(bundle: Path) -> None:
    before = {file.name: file.read_bytes() for file in bundle.iterdir()}
    with pytest.raises(BundleError, match="exists already"):
        bundle_of(bundle, "linear")
    assert {file.name: file.read_bytes() for file in bundle.iterdir()} == before


def nan(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("blocks.1.norm1.weight")[3] = float("nan")


def untold_tie(model: nn.Module) -> None:
    weight = model.get_submodule("blocks.0.mlp.fc1").weight
    model.get_submodule("blocks.0.mlp.fc2").weight = nn.Parameter(weight.detach().t())


@pytest.mark.parametrize(
    ("change", "fields", "message"),
    [
        (nan, {}, "blocks.1.norm1.weight holds NaN or Inf"),
        (untold_tie, {}, "blocks.0.mlp.fc1.weight and blocks.0.mlp.fc2.weight share memory"),
        (nn.Module.bfloat16, {}, r"cls_token is torch\.bfloat16; bundles hold float32"),
        (None, {"class_names": ("a", "b")}, r"logits: got \(1, 3\), wanted \(1, 2\) by the card's 2 class_names"),
        (None, {"attention": "separate"}, r"blocks\.0\.attn\.proj\.bias is missing"),
        (None, {"backbone": "vit_tiny_patch16_225"}, "unknown backbone 'vit_tiny_patch16_225'"),
        (None, {"timm_kwargs": TINY | {"depth": 3}}, r"blocks\.2\.\S+ is missing"),
        (None, {"timm_kwargs": TINY | {"depht": 2}}, "depht"),
        (None, {"timm_kwargs": TINY | {"class_token": False, "global_pool": "avg"}}, "cls_token is not the model's"),
        (None, {"timm_kwargs": TINY | {"num_heads": 4}}, "logits differ by"),
        (
            None,
            {"preprocessing": Preprocessing(size=(24, 24), mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))},
            r"refuses an input of \(1, 3, 24, 24\)",
        ),
    ],
)
def test_what_would_not_load_is_not_saved(
    tmp_path: Path, change: Callable[[nn.Module], object] | None, fields: dict[str, Any], message: str
) -> None:
    model, card = make("parameter"), card_of(**({"attention": "parameter"} | fields))
    if change:
        change(model)
    with pytest.raises(BundleError, match=message) as caught:
        save_bundle(model, card, tmp_path / "bundle")
    assert ".partial" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [WEIGHTS, GOLDEN])
def test_a_disk_that_fills_up_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    module = golden if name == GOLDEN else tensor_files
    real = module.save_file

    def fill_up(tensors: dict[str, Any], file: Path, metadata: dict[str, str]) -> None:
        if file.name == name:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(tensors, file, metadata)

    monkeypatch.setattr(module, "save_file", fill_up)
    with pytest.raises(BundleError, match=r"bundle: cannot be written \(No space left on device\); nothing is left"):
        bundle_of(tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_one_line() -> None:
    with pytest.raises(BundleError, match=r"/proc/bundle: cannot be written \("):
        bundle_of(Path("/proc/bundle"))


@pytest.mark.parametrize("name", ["blocks.0.attn.qkv.to_k", "head.bias", "pos_embed"])
def test_check_golden_catches_a_weight_that_moved(bundle: Path, name: str) -> None:
    model, _ = load_bundle(bundle)
    with torch.no_grad():
        model.get_parameter(name).add_(torch.randn(model.get_parameter(name).shape) * 0.3)
    with pytest.raises(BundleError, match="logits differ by"):
        check_golden(model, bundle)


def test_check_golden_catches_nan(bundle: Path) -> None:
    model, _ = load_bundle(bundle)
    nan(model)
    with pytest.raises(BundleError, match="logits differ by nan"):
        check_golden(model, bundle)
