"""A swapped model's tensors by timm's names, whatever variant stored them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import zoo
from tests.zoo.trained import OTHER_SIZE, adapted, change, checkpoint, load, make, saved
from zoo.attention import Attention
from zoo.errors import BackboneError
from zoo.files.stock_names import to_stock_names
from zoo.files.tensor_files import read_tied, same_bits, write_tensors


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


def test_every_form_of_attention_goes_through_a_file(
    tmp_path: Path, build_stock: Callable[..., nn.Module], form: str, variant: str
) -> None:
    """The tensors come back bit for bit by timm's names; what each form is, tests/zoo/conftest.py says."""
    stock = build_stock(form)
    swapped = build_stock(form)
    zoo.swap_attention(swapped, variant)
    write_tensors(tmp_path / "x.safetensors", swapped.state_dict())
    tensors, ties = read_tied(tmp_path / "x.safetensors")
    found = to_stock_names(tensors, ties, build_stock(form, seed=1), None)
    assert found.tensors.keys() == stock.state_dict().keys()
    assert all(same_bits(found.tensors[name], tensor) for name, tensor in stock.state_dict().items())
    assert (found.ties, found.own, found.lacking) == ({}, {}, ())


FAMILIES = (
    *("levit_128s", "convit_tiny", "crossvit_tiny_240", "volo_d1_224", "swin_tiny_patch4_window7_224", "coat_tiny"),
    *("mvitv2_tiny", "xcit_nano_12_p16_224", "maxvit_tiny_rw_224", "pit_ti_224"),
)


@pytest.mark.slow
@pytest.mark.parametrize("backbone", FAMILIES)
def test_other_families_go_through_a_file_with_a_new_head(tmp_path: Path, backbone: str) -> None:
    torch.manual_seed(0)
    stock = timm.create_model(backbone, num_classes=3)
    swapped = timm.create_model(backbone, num_classes=3)
    swapped.load_state_dict(stock.state_dict())
    zoo.swap_attention(swapped, "parameter")
    write_tensors(tmp_path / "x.safetensors", swapped.state_dict())
    model = zoo.create_model(backbone, "linear", pretrained=tmp_path / "x.safetensors", num_classes=4)
    wanted, got = stock.state_dict(), zoo.restore_attention(model) and model.state_dict()
    report = zoo.find_report(model)
    assert report is not None
    assert all("replaced, 3 -> 4 classes" in note for note in report.adapted)
    heads = {note.partition(":")[0] for note in report.adapted}
    kept = [name for name in wanted if name.rpartition(".")[0] not in heads]
    assert len(kept) == report.num_tensors
    assert all(same_bits(got[name], wanted[name]) for name in kept)
