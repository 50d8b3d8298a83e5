"""Weights from files into models of every variant: used, adapted and said, or refused by name."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.layers import resample_abs_pos_embed
from timm.models import save_for_hf
from torch import Tensor, nn

import zoo
from zoo.attention import Attention
from zoo.bundle import save_bundle
from zoo.card import ModelCard, Preprocessing
from zoo.errors import BackboneError, BundleError, UnknownNameError
from zoo.pretrained import find_report
from zoo.tensor_files import same_bits, write_tensors

BACKBONE = "vit_tiny_patch16_224"
TINY: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
OTHER_SIZE = TINY | {"img_size": 48}


def make(attention: str = "linear", backbone: str = BACKBONE, **kwargs: Any) -> nn.Module:
    """Build a model whose every tensor has numbers of its own, the same function for every variant."""
    model = zoo.create_model(backbone, seed=1, **({"num_classes": 3} | TINY | kwargs))
    draws = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draws) * 0.1)
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
    known = {"backbone": BACKBONE, "timm_kwargs": TINY, "class_names": ("ash", "elm", "oak"), "preprocessing": look}
    return ModelCard.model_validate(known | {"attention": attention} | fields)


@pytest.mark.parametrize("saved_as", zoo.list_attentions())
def test_a_file_of_any_variant_loads_into_any_other(
    tmp_path: Path, images: Tensor, saved_as: str, variant: str
) -> None:
    model = load(saved(tmp_path, saved_as), variant)
    assert torch.equal(model(images), make()(images))
    assert adapted(model) == ()
    assert str(find_report(model)) == f"32 tensors of {tmp_path / 'weights.safetensors'}"


def test_stock_files_load_into_a_swapped_model_by_load_state_dict_and_back_after_restore(
    tmp_path: Path, variant: str
) -> None:
    stock = timm.create_model(BACKBONE, num_classes=3, **TINY)
    save_file(stock.state_dict(), tmp_path / "stock.safetensors")
    swapped = zoo.create_model(BACKBONE, variant, num_classes=3, **TINY)
    swapped.load_state_dict(load_file(tmp_path / "stock.safetensors"), strict=True)
    zoo.restore_attention(swapped)
    save_file(swapped.state_dict(), tmp_path / "back.safetensors")
    assert (tmp_path / "back.safetensors").read_bytes() == (tmp_path / "stock.safetensors").read_bytes()
    timm.create_model(BACKBONE, num_classes=3, **TINY).load_state_dict(load_file(tmp_path / "back.safetensors"))


def test_another_class_count_gets_the_head_that_the_seed_draws_and_another_size_timms_resampling(
    tmp_path: Path, variant: str
) -> None:
    model = load(saved(tmp_path, variant), "separate", num_classes=5, **OTHER_SIZE)
    assert adapted(model) == ("pos_embed: resampled 4x4 -> 6x6", "head: replaced, 3 -> 5 classes")
    drawn = zoo.create_model(BACKBONE, seed=3, num_classes=5, **OTHER_SIZE)
    assert torch.equal(model.get_parameter("head.weight"), drawn.get_parameter("head.weight"))
    old = make().get_parameter("pos_embed").detach()
    wanted = resample_abs_pos_embed(old, new_size=[6, 6], num_prefix_tokens=1)
    assert torch.equal(model.get_parameter("pos_embed"), wanted)
    assert torch.equal(model.get_parameter("norm.weight"), make().get_parameter("norm.weight"))


def test_it_is_what_timms_own_loader_gives(tmp_path: Path) -> None:
    file = saved(tmp_path)
    overlay = {"file": str(file), "num_classes": 3}
    kwargs = OTHER_SIZE | {"num_classes": 5}
    torch.manual_seed(3)
    wanted = timm.create_model(BACKBONE, pretrained=True, pretrained_cfg_overlay=overlay, **kwargs).state_dict()
    got = load(file, **kwargs).state_dict()
    assert got.keys() == wanted.keys()
    assert all(same_bits(got[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (0, 5, "head: new, 5 classes; the file has none"),
        (3, 0, "head: left out, 3 -> 0 classes"),
    ],
)
def test_a_head_that_only_one_side_has_is_said(tmp_path: Path, before: int, after: int, said: str) -> None:
    assert adapted(load(saved(tmp_path, num_classes=before), num_classes=after)) == (said,)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of timm's resampling
def test_relative_position_tables_are_resampled_and_counted(tmp_path: Path) -> None:
    write_tensors(tmp_path / "beit.safetensors", make("parameter", "beit_base_patch16_224").state_dict())
    model = load(tmp_path / "beit.safetensors", "separate", "beit_base_patch16_224", img_size=64)
    assert adapted(model) == ("2 relative_position_bias_table: resampled (52, 2) -> (228, 2)",)


def test_positions_on_a_grid_that_is_not_square_keep_their_shape_from_a_bundle(tmp_path: Path) -> None:
    """8 x 2 patches onto 4 x 4 are as many tokens: only the bundle's img_size can tell them apart."""
    long = {"img_size": [64, 16]}
    look = Preprocessing(size=(64, 16), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    source = make("parameter", **long)
    save_bundle(source, card_of("parameter", timm_kwargs=TINY | long, preprocessing=look), tmp_path / "bundle")
    model = load(tmp_path / "bundle")
    old = source.get_parameter("pos_embed").detach()
    wanted = resample_abs_pos_embed(old, new_size=[4, 4], old_size=[8, 2], num_prefix_tokens=1)
    assert torch.equal(model.get_parameter("pos_embed"), wanted)
    assert adapted(model) == ("pos_embed: resampled 8x2 -> 4x4",)


def change(file: Path, **tensors: Tensor | None) -> Path:
    state = {name: tensor.clone() for name, tensor in load_file(file).items()}
    for name, tensor in tensors.items():
        if tensor is None:
            del state[name]
        else:
            state[name] = tensor
    save_file(state, file)
    return file


@pytest.mark.parametrize("attention", ["linear", "parameter"])
@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"norm.weight": None}, "does not fit VisionTransformer: norm.weight is missing"),
        ({"blocks.1.mlp.fc1.bias": None, "norm.bias": None}, "blocks.1.mlp.fc1.bias is missing; norm.bias is missing"),
        ({"extra": torch.ones(1)}, "extra is not the model's"),
        ({"norm.weight": torch.ones(31)}, r"norm.weight: got \(31,\) float32, wanted \(32,\) float32"),
        ({"norm.weight": torch.ones(32).long()}, r"norm.weight: got \(32,\) int64, wanted \(32,\) float32"),
        ({"norm.weight": torch.full((32,), float("nan"))}, "norm.weight holds NaN or Inf"),
        ({"norm.bias": torch.full((32,), float("inf"))}, "norm.bias holds NaN or Inf"),
        ({"head.weight": torch.ones(5, 31)}, r"head.weight: got \(5, 31\) float32"),
        ({"head.weight": torch.ones(5, 32)}, r"head.weight: got \(5, 32\) float32"),  # its bias has three
        ({"head.bias": None}, "head.bias is missing"),
        ({"head.weight": torch.ones(())}, r"head.weight: got \(\) float32"),
        ({"pos_embed": torch.ones(1, 14, 32)}, "weights.safetensors: timm cannot adapt it to VisionTransformer: "),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    tmp_path: Path, attention: str, tensors: dict[str, Tensor | None], message: str
) -> None:
    file = change(saved(tmp_path, attention), **tensors)
    with pytest.raises(BackboneError, match=message) as caught:
        load(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"blocks.0.attn.qkv.to_k": None}, "blocks.0.attn.qkv.to_k is missing"),
        ({"blocks.0.attn.qkv.to_k": torch.ones(32, 31)}, r"blocks.0.attn.qkv.to_k: got \(32, 31\), wanted \(32, 32\)"),
        ({"blocks.1.attn.proj.projection_bias": None}, "blocks.1.attn.proj.projection_bias is missing"),
        (
            {"blocks.1.attn.proj.weight": torch.ones(32, 32)},
            "blocks.1.attn.proj.weight stands beside blocks.1.attn.proj.projection: both",
        ),
    ],
)
def test_a_swapped_models_projection_that_is_not_whole_is_named(
    tmp_path: Path, tensors: dict[str, Tensor | None], message: str
) -> None:
    with pytest.raises(BackboneError, match=message):
        load(change(saved(tmp_path, "parameter"), **tensors))


def test_another_width_of_float_is_cast_and_said(tmp_path: Path) -> None:
    state = {name: tensor.half() for name, tensor in make().state_dict().items()}
    save_file(state, tmp_path / "half.safetensors")
    model = load(tmp_path / "half.safetensors", "parameter")
    assert adapted(model) == ("32 tensors cast float16 -> float32",)
    assert model.get_parameter("norm.weight").dtype == torch.float32


def test_a_wrappers_prefix_is_taken_off(tmp_path: Path, images: Tensor) -> None:
    save_file({f"module.{name}": t for name, t in make().state_dict().items()}, tmp_path / "ddp.safetensors")
    assert torch.equal(load(tmp_path / "ddp.safetensors")(images), make()(images))


def test_other_numbers_of_channels_are_converted_as_timm_does(tmp_path: Path) -> None:
    model = load(saved(tmp_path), in_chans=1)
    assert adapted(model) == ("patch_embed.proj: converted, 3 -> 1 channels",)
    old = make().get_parameter("patch_embed.proj.weight").detach()
    torch.testing.assert_close(model.get_parameter("patch_embed.proj.weight"), old.sum(dim=1, keepdim=True))


def test_arguments_that_show_in_no_shape_are_said(tmp_path: Path) -> None:
    save_bundle(make("parameter"), card_of("parameter"), tmp_path / "bundle")
    model = load(tmp_path / "bundle", num_heads=4, drop_rate=0.5)
    assert adapted(model) == ("num_heads: 2 -> 4",)
    model = load(tmp_path / "bundle", backbone="vit_small_patch16_224")
    assert adapted(model) == ("backbone: vit_tiny_patch16_224 -> vit_small_patch16_224",)


def checkpoint(folder: Path, attention: str) -> Path:
    folder.mkdir()
    config = {"model.backbone": BACKBONE, "model.attention": attention}
    config |= {f"model.timm_kwargs.{key}": value for key, value in TINY.items()}
    (folder / "state.json").write_text(json.dumps({"config": config}), encoding="utf-8")
    write_tensors(folder / "model.safetensors", make(attention).state_dict())
    return folder


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


def test_ties_of_a_file_are_tied_in_the_model(tmp_path: Path, variant: str) -> None:
    source = make("parameter")
    first, second = (source.get_submodule(f"blocks.{i}") for i in (0, 1))
    second.mlp.fc1.weight = first.mlp.fc1.weight
    second.attn.qkv, second.attn.proj = first.attn.qkv, first.attn.proj  # all of both projections
    write_tensors(tmp_path / "tied.safetensors", source.state_dict())
    model = load(tmp_path / "tied.safetensors", variant)
    assert model.get_parameter("blocks.1.mlp.fc1.weight") is model.get_parameter("blocks.0.mlp.fc1.weight")
    one, two = (dict(model.get_submodule(f"blocks.{i}.attn").named_parameters()) for i in (0, 1))
    assert one.keys() == two.keys()
    assert all(one[name] is two[name] for name in one)
    assert adapted(model) == ()


def test_a_tie_of_one_part_stays_where_the_part_has_a_name_and_is_said_where_not(tmp_path: Path) -> None:
    source = make("parameter")
    qkv = source.get_submodule("blocks.0.attn.qkv")
    qkv.to_k = qkv.to_q
    write_tensors(tmp_path / "tied.safetensors", source.state_dict())
    model = load(tmp_path / "tied.safetensors", "parameter")
    assert model.get_parameter("blocks.0.attn.qkv.to_k") is model.get_parameter("blocks.0.attn.qkv.to_q")
    assert adapted(load(tmp_path / "tied.safetensors", "linear")) == (
        "blocks.0.attn.qkv.to_k and blocks.0.attn.qkv.to_q: tied in the file, two tensors now",
    )


@pytest.fixture
def tempered(own_registry: None) -> str:  # noqa: ARG001
    """A whole-module variant with a parameter of its own."""

    @zoo.register_attention("tempered")
    class Tempered(Attention):
        projection = "separate"

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.temperature = nn.Parameter(torch.ones(self.num_heads, 1, 1))

    return "tempered"


def test_a_variants_own_tensors_load_into_it_and_into_no_other(tmp_path: Path, tempered: str) -> None:
    source = make(tempered)
    file = saved(tmp_path, tempered)
    assert "blocks.0.attn.temperature" in load_file(file)
    model = load(file, tempered, num_classes=4, **OTHER_SIZE)
    assert torch.equal(
        model.get_parameter("blocks.1.attn.temperature"), source.get_parameter("blocks.1.attn.temperature")
    )
    assert adapted(model) == ("pos_embed: resampled 4x4 -> 6x6", "head: replaced, 3 -> 4 classes")
    with pytest.raises(BackboneError, match=r"blocks\.0\.attn\.temperature is of tempered, not of linear"):
        load(file, "linear")
    with pytest.raises(BackboneError, match=r"blocks\.0\.attn\.temperature: got \(3, 1, 1\)"):
        load(change(file, **{"blocks.0.attn.temperature": torch.ones(3, 1, 1)}), tempered)
    folder = checkpoint(tmp_path / "step-1", tempered)  # which says what the names alone leave open
    change(folder / "model.safetensors", **{"blocks.1.attn.temperature": None})
    with pytest.raises(BackboneError, match=r"blocks\.1\.attn\.temperature is missing"):
        load(folder, tempered)


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


def test_pretrained_with_init_is_refused_for_a_path_too(tmp_path: Path) -> None:
    with pytest.raises(BackboneError, match="init='torch' would overwrite pretrained weights"):
        zoo.create_model(BACKBONE, pretrained=tmp_path, init="torch")


def test_a_model_that_loaded_nothing_has_no_report() -> None:
    assert find_report(make()) is None
    assert issubclass(BundleError, ValueError)
