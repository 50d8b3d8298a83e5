import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import save_for_hf
from torch import Tensor, nn

import zoo
from zoo.errors import BackboneError, SwapError, UnknownNameError
from zoo.projections import ParameterProjection

BuildStock = Callable[..., nn.Module]
TINY: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 3}
BACKBONE = "vit_tiny_patch16_224"


def test_the_variants_of_one_seed_are_timms_model_of_that_seed(images: Tensor, variant: str) -> None:
    torch.manual_seed(5)
    stock = timm.create_model(BACKBONE, **TINY)
    torch.manual_seed(6)
    before = torch.get_rng_state()
    model = zoo.create_model(BACKBONE, variant, seed=5, **TINY)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert torch.equal(model.eval()(images), stock.eval()(images))


@pytest.mark.parametrize("init", [None, "timm"])
def test_timms_draw_is_kept(images: Tensor, init: str | None) -> None:
    wanted = zoo.create_model(BACKBONE, seed=5, **TINY).eval()
    assert torch.equal(
        zoo.create_model(BACKBONE, "parameter", init=init, seed=5, **TINY).eval()(images), wanted(images)
    )


def test_a_scheme_draws_the_attention_alone(images: Tensor) -> None:
    plain = zoo.create_model(BACKBONE, "linear", seed=5, **TINY)
    arms = [zoo.create_model(BACKBONE, variant, init="normal", seed=5, **TINY) for variant in zoo.list_attentions()]
    first, *others = [arm.eval()(images) for arm in arms]
    assert all(torch.equal(first, other) for other in others)
    assert zoo.attention_weights(arms[0])["blocks.0.attn"]["q"].std().item() == pytest.approx(1, rel=0.1)
    assert torch.equal(arms[0].get_parameter("head.weight"), plain.get_parameter("head.weight"))


def test_no_seed_draws_from_the_global_stream() -> None:
    torch.manual_seed(1)
    first, second = (zoo.create_model(BACKBONE, "parameter", init="torch", **TINY) for _ in range(2))
    torch.manual_seed(1)
    again = zoo.create_model(BACKBONE, "parameter", init="torch", **TINY)
    name = "blocks.0.attn.qkv.to_q"
    assert torch.equal(first.get_parameter(name), again.get_parameter(name))
    assert not torch.equal(first.get_parameter(name), second.get_parameter(name))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"backbone": "vit_tiny_patch16_22"},
            "unknown backbone 'vit_tiny_patch16_22', did you mean 'vit_tiny_patch16_224'",
        ),
        ({"backbone": "zzz"}, r"unknown backbone 'zzz'; python -m zoo list shows them"),
        ({"attention": "linaer"}, "unknown attention 'linaer', did you mean 'linear'"),
        ({"init": "torhc"}, "unknown init 'torhc', did you mean 'torch'"),
    ],
)
def test_an_unknown_name_gives_the_nearest(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UnknownNameError, match=message):
        zoo.create_model(**({"backbone": BACKBONE} | arguments))


@pytest.mark.parametrize(
    "wrong",
    [
        {"bogus": 1},
        {"embed_dim": 31},
        {"patch_size": 0},  # ZeroDivisionError in timm
        {"num_heads": 0},
        {"depth": "x"},
        {"depth": -1},
        {"act_layer": "nope"},  # KeyError
        {"img_size": ()},  # IndexError
        {"global_pool": "nope"},
        {"pretrained_cfg": "nope"},
    ],
)
def test_arguments_that_timm_cannot_take_are_one_line(wrong: dict[str, Any]) -> None:
    with pytest.raises(BackboneError) as caught:
        zoo.create_model(BACKBONE, **(TINY | wrong))
    line = str(caught.value)
    key, value = next(iter(wrong.items()))
    assert line.startswith(f"{BACKBONE}: timm cannot build it with ")
    assert f"{key}={value!r}" in line
    assert "\n" not in line
    assert caught.value.__cause__ is not None


def test_an_unknown_tag_is_named() -> None:
    with pytest.raises(BackboneError, match=r"Invalid pretrained tag \(nope\)"):
        zoo.create_model(f"{BACKBONE}.nope")


def test_pretrained_with_init_is_refused_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timm, "create_model", lambda *_, **__: pytest.fail("timm was asked"))
    with pytest.raises(BackboneError, match="init='torch' would overwrite pretrained weights"):
        zoo.create_model(BACKBONE, pretrained=True, init="torch")


@pytest.mark.parametrize("backbone", ["resnet10t", "visformer_tiny"])
def test_a_backbone_that_cannot_be_swapped_is_refused(backbone: str) -> None:
    with pytest.raises(SwapError, match=r"ResNet has no attention|cannot swap Attention"):
        zoo.create_model(backbone)


def test_a_folder_in_timms_format_loads_and_swaps(tmp_path: Path, images: Tensor, variant: str) -> None:
    stock = zoo.create_model(BACKBONE, seed=2, **TINY).eval()
    save_for_hf(stock, tmp_path, model_args=TINY, safe_serialization=True)
    model = zoo.create_model(f"local-dir:{tmp_path}", variant, pretrained=True).eval()
    assert torch.equal(model(images), stock(images))
    assert isinstance(model.get_submodule("blocks.0.attn.qkv"), ParameterProjection) == (variant == "parameter")


def folder_of(tmp_path: Path, *names: str) -> str:
    config = {"architecture": BACKBONE, "model_args": TINY, "pretrained_cfg": {"num_classes": 3}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in names:
        if name.endswith(".safetensors"):
            save_file(zoo.create_model(BACKBONE, seed=2, **TINY).state_dict(), tmp_path / name)
        else:
            (tmp_path / name).write_bytes(b"\x80\x04N.")  # a pickle
    return f"local-dir:{tmp_path}"


@pytest.mark.parametrize("names", [(), ("pytorch_model.bin",), ("pytorch_model.bin", "weights.safetensors")])
def test_a_folder_whose_weights_are_pickled_is_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    # timm itself would prefer pytorch_model.bin to weights.safetensors
    with pytest.raises(BackboneError, match=r"no model\.safetensors in .*; pickled weights are not read"):
        zoo.create_model(folder_of(tmp_path, *names), pretrained=True)


def test_safetensors_are_read_although_a_pickle_lies_beside_them(tmp_path: Path) -> None:
    backbone = folder_of(tmp_path, "model.safetensors", "pytorch_model.bin")
    model = zoo.create_model(backbone, pretrained=True)
    wanted = zoo.create_model(BACKBONE, seed=2, **TINY)
    assert torch.equal(model.get_parameter("head.weight"), wanted.get_parameter("head.weight"))


def test_a_folder_that_is_missing_or_damaged_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BackboneError, match=r"no config\.json in"):
        zoo.create_model(f"local-dir:{tmp_path / 'nowhere'}")
    backbone = folder_of(tmp_path, "model.safetensors")
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(BackboneError, match=r"model\.safetensors: truncated, or not safetensors"):
        zoo.create_model(backbone, pretrained=True)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(BackboneError, match=r"config\.json: not JSON in UTF-8"):
        zoo.create_model(backbone)


def test_a_pickled_checkpoint_path_is_refused_and_a_safe_one_loads(tmp_path: Path, images: Tensor) -> None:
    stock = zoo.create_model(BACKBONE, seed=2, **TINY).eval()
    save_file(stock.state_dict(), tmp_path / "weights.safetensors")
    model = zoo.create_model(BACKBONE, "parameter", checkpoint_path=tmp_path / "weights.safetensors", **TINY)
    assert torch.equal(model.eval()(images), stock(images))
    with pytest.raises(BackboneError, match=r"checkpoint_path='.*weights\.pth': only \.safetensors"):
        zoo.create_model(BACKBONE, checkpoint_path=tmp_path / "weights.pth", **TINY)
