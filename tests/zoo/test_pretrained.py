"""Weights from files into models of every variant: used, adapted and said, or refused by name."""

from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.layers import resample_abs_pos_embed
from torch import Tensor

import zoo
from tests.zoo.trained import BACKBONE, OTHER_SIZE, TINY, adapted, card_of, change, load, make, saved
from zoo.bundle import save_bundle
from zoo.card import Preprocessing
from zoo.errors import BackboneError
from zoo.files.tensor_files import same_bits, write_tensors
from zoo.pretrained import find_report


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
        (
            {"pos_embed": torch.ones(1, 14, 32)},
            r"weights.safetensors: timm cannot adapt it to VisionTransformer: pos_embed: got \(1, 14, 32\) float32, "
            r"wanted \(1, 17, 32\)",
        ),
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


def test_tokens_that_the_file_has_no_place_for_are_named(tmp_path: Path) -> None:
    with pytest.raises(BackboneError, match=r"pos_embed: got \(1, 17, .*wanted \(1, 21, .*; reg_token is missing$"):
        load(saved(tmp_path), reg_tokens=4)


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


def test_pretrained_with_init_is_refused_for_a_path_too(tmp_path: Path) -> None:
    with pytest.raises(BackboneError, match="init='torch' would overwrite pretrained weights"):
        zoo.create_model(BACKBONE, pretrained=tmp_path, init="torch")


def test_a_model_that_loaded_nothing_has_no_report() -> None:
    assert find_report(make()) is None
