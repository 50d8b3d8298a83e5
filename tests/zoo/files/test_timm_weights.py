"""Where timm's own weights come from: the hub is played by a folder."""

import threading
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models import _builder
from torch import Tensor, nn

import zoo
from tests.zoo.trained import BACKBONE, TINY, adapted, make, saved
from zoo.errors import BackboneError
from zoo.files import timm_weights
from zoo.files.timm_weights import Recipe, fetch, loading_by


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """A hub that holds one file for whoever asks, and notes what was asked for."""
    asked: list[tuple[str, str]] = []
    file = saved(tmp_path)

    def download(hub_id: str, name: str) -> str:
        asked.append((hub_id, name))
        return str(file)

    monkeypatch.setattr(timm_weights, "download_from_hf", download)
    return asked


def test_timms_own_weights_are_fetched_as_safetensors_and_checked(
    hub: list[tuple[str, str]], images: Tensor, variant: str
) -> None:
    model = zoo.create_model(BACKBONE, variant, pretrained=True, num_classes=3, seed=1, **TINY).eval()
    assert hub == [("timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k", "model.safetensors")]
    assert torch.equal(model(images), make()(images))
    more = zoo.create_model(BACKBONE, variant, pretrained=True, num_classes=7, seed=1, **TINY)
    assert adapted(more) == ("head: replaced, 3 -> 7 classes",)
    with pytest.raises(BackboneError, match=r"blocks\.2\.attn\.proj\.bias is missing"):
        zoo.create_model(BACKBONE, variant, pretrained=True, num_classes=7, **(TINY | {"depth": 3}))


def config(**fields: Any) -> Recipe:
    return Recipe({"architecture": "x"} | fields, None)


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        (None, "model.safetensors"),
        ("pytorch_model.bin", "model.safetensors"),
        ("open_clip_pytorch_model.bin", "open_clip_model.safetensors"),
    ],
)
def test_a_pickle_on_the_hub_is_asked_for_as_safetensors(
    hub: list[tuple[str, str]], name: str | None, asked: str
) -> None:
    fetch(config(hf_hub_id="a/b", hf_hub_filename=name), "x")
    assert hub == [("a/b", asked)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "x: timm has no pretrained weights for it; add a tag that has, or give a path"),
        ({"hf_hub_id": "a/b", "hf_hub_filename": "x.pth"}, "a/b holds x.pth, not safetensors; no pickle is read"),
        ({"url": "https://example.org/x.pth"}, "timm keeps these weights at https://example.org/x.pth, not as safeten"),
    ],
)
def test_weights_that_are_nowhere_or_pickled_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BackboneError, match=message):
        fetch(config(**fields), "x")


def test_a_hub_out_of_reach_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(hub_id: str, name: str) -> str:
        raise ConnectionError(f"no way to\n{hub_id}/{name}")

    monkeypatch.setattr(timm_weights, "download_from_hf", fail)
    with pytest.raises(BackboneError, match=r"cannot fetch model\.safetensors of a/b from the hub") as caught:
        fetch(config(hf_hub_id="a/b"), "x")
    assert "ConnectionError: no way to a/b/model.safetensors" in str(caught.value)
    assert "give its path as pretrained" in str(caught.value)


def test_timms_loader_is_back_afterwards_and_another_threads_is_never_gone(tmp_path: Path) -> None:
    original = _builder.load_pretrained
    overlay = {"file": str(saved(tmp_path)), "num_classes": 3}
    got: list[nn.Module] = []

    def elsewhere() -> None:
        with torch.no_grad():
            got.append(timm.create_model(BACKBONE, pretrained=True, pretrained_cfg_overlay=overlay, **TINY).eval())

    def load(_: nn.Module, recipe: Recipe) -> None:
        assert recipe.names("classifier") == ("head",)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        raise BackboneError("on purpose")

    with pytest.raises(BackboneError, match="on purpose"), loading_by(load):
        timm.create_model(BACKBONE, pretrained=True, **TINY)
    assert _builder.load_pretrained is original
    assert torch.equal(got[0].get_parameter("norm.weight"), make().get_parameter("norm.weight"))


def test_what_timm_itself_does_not_load_strictly_is_left_out_and_said(tmp_path: Path) -> None:
    """SigLIP's pooling head, of a model that averages instead."""
    backbone, tiny = "vit_base_patch16_siglip_gap_224", TINY
    state = make("linear", backbone).state_dict()
    file = tmp_path / "x.safetensors"
    from safetensors.torch import save_file

    save_file(state | {"attn_pool.latent": torch.ones(1, 1, 32)}, file)
    model = zoo.create_model(backbone, pretrained=file, num_classes=3, **tiny)
    assert adapted(model) == ("attn_pool.latent: left out, this model has none",)
