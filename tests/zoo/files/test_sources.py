"""Every place that weights may lie at, and what is wrong with one."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from timm.models import save_for_hf
from torch import Tensor

from tests.zoo.trained import BACKBONE, TINY, adapted, card_of, checkpoint, load, make, saved
from zoo.bundle import save_bundle
from zoo.errors import BackboneError, BundleError, UnknownNameError
from zoo.files.sources import find_source, read_json, read_timm_config


def timm_folder(folder: Path) -> Path:
    save_for_hf(make(), folder, model_args=TINY, safe_serialization=True)
    return folder


SOURCES: dict[str, Callable[[Path], Path | str]] = {
    "checkpoint": lambda tmp: checkpoint(tmp / "step-1", "separate"),
    "timm": lambda tmp: timm_folder(tmp / "timm"),
    "local-dir": lambda tmp: f"local-dir:{timm_folder(tmp / 'timm')}",
    "text": lambda tmp: str(saved(tmp, "parameter")),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_kind_of_place_is_read(tmp_path: Path, images: Tensor, kind: str, variant: str) -> None:
    model = load(SOURCES[kind](tmp_path), variant)
    assert torch.equal(model(images), make()(images))
    assert adapted(model) == ()


def test_a_bundle_is_read(tmp_path: Path, images: Tensor, variant: str) -> None:
    save_bundle(make(variant), card_of(variant), tmp_path / "bundle")
    assert torch.equal(load(tmp_path / "bundle")(images), make()(images))


def test_a_bundles_flipped_bit_is_named(tmp_path: Path) -> None:
    save_bundle(make("parameter"), card_of("parameter"), tmp_path / "bundle")
    file = tmp_path / "bundle" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-4] ^= 1
    file.write_bytes(data)
    with pytest.raises(BackboneError, match=r"pretrained .*model\.safetensors: damaged"):
        load(tmp_path / "bundle")


def test_a_variant_that_is_not_registered_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="unknown attention 'seperate', did you mean 'separate'"):
        load(checkpoint_of_unknown(tmp_path / "step-1"))


def checkpoint_of_unknown(folder: Path) -> Path:
    path = checkpoint(folder, "separate")
    text = (path / "state.json").read_text(encoding="utf-8")
    (path / "state.json").write_text(text.replace('"separate"', '"seperate"'), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (Path.exists, "nothing is there; wanted a bundle, a checkpoint, "),
        (lambda p: p.with_suffix(".pth").write_bytes(b""), "nothing is there"),
        (lambda p: p.write_bytes(b""), r"truncated \(0 bytes\)"),
        (lambda p: p.write_bytes(pickle.dumps({})), "a pickle, not safetensors"),
        (lambda p: p.mkdir(), r"no model\.safetensors that could be read here"),
        (lambda p: p.symlink_to(p), r"cannot be read \(Too many levels of symbolic links\)"),
    ],
)
def test_a_path_with_nothing_to_read_is_named(tmp_path: Path, write: Callable[[Path], object], message: str) -> None:
    path = tmp_path / "w.safetensors"
    write(path)
    with pytest.raises(BackboneError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("inside", "meant"),
    [
        (("bundle", "checkpoints/step-00000002"), "bundle"),
        (("checkpoints/step-00000001", "checkpoints/step-00000002"), "checkpoints/step-00000002"),
        (("latest/bundle",), "latest/bundle"),
        (("images",), None),
    ],
)
def test_a_runs_folder_points_to_what_may_be_meant(tmp_path: Path, inside: tuple[str, ...], meant: str | None) -> None:
    for folder in inside:
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "model.safetensors").touch()
    with pytest.raises(BackboneError, match=r"no model\.safetensors that could be read here") as caught:
        load(tmp_path)
    assert str(caught.value).partition("; did you mean ")[2] == ("" if meant is None else f"{tmp_path / meant}?")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "not JSON in UTF-8"),
        (b"", "not JSON in UTF-8"),
        (b'{"x": "\xff"}', "not JSON in UTF-8"),
        (b"[" * 100_000, "not JSON in UTF-8"),
        (b"[1]", "got a list, wanted an object"),
        (b" " * 16_000_001, "more than 16,000,000 bytes"),
    ],
)
def test_a_description_that_is_no_json_object_is_named(tmp_path: Path, text: bytes, message: str) -> None:
    for name in ("config.json", "state.json"):
        (tmp_path / name).write_bytes(text)
        with pytest.raises(BundleError, match=rf"{name}: {message}"):
            read_json(tmp_path / name)
        with pytest.raises(BundleError, match=rf"{name}: {message}"):
            find_source(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, r"config\.json: not a configuration of timm's \(KeyError: 'architecture'\)"),
        ({"architecture": 3}, "not a configuration of timm's"),
        ({"architecture": "vit_tiny_patch16_224", "model_args": [1], "pretrained_cfg": {}}, "not a configuration"),
        ({"architecture": "vit_tiny_patch16_224", "pretrained_cfg": [1]}, "not a configuration of timm's"),
    ],
)
def test_a_configuration_that_timm_would_choke_on_is_named(
    tmp_path: Path, content: dict[str, object], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(BundleError, match=message):
        read_timm_config(tmp_path)


@pytest.mark.parametrize("config", [{}, {"config": 1}, {"config": {"model.backbone": "x"}}])
def test_a_state_that_says_nothing_of_its_model_is_named(tmp_path: Path, config: dict[str, object]) -> None:
    (tmp_path / "state.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(BundleError, match=r"state\.json: not a checkpoint's state: "):
        find_source(tmp_path)


def test_what_lies_there_is_known_without_reading_the_weights(tmp_path: Path) -> None:
    source = find_source(checkpoint(tmp_path / "step-1", "separate"))
    assert (source.backbone, source.attention, source.timm_kwargs) == (BACKBONE, "separate", TINY)
    save_bundle(make("parameter"), card_of("parameter"), tmp_path / "bundle")
    source = find_source(tmp_path / "bundle")
    assert (source.backbone, source.attention, source.timm_kwargs) == (BACKBONE, "parameter", TINY)
    source = find_source(timm_folder(tmp_path / "timm"))
    assert (source.backbone, source.attention, source.timm_kwargs["num_heads"]) == (BACKBONE, None, 2)
    (tmp_path / "plain").mkdir()
    file = saved(tmp_path / "plain").rename(tmp_path / "plain" / "model.safetensors")
    assert find_source(tmp_path / "plain").file == find_source(file).file == file
