"""Bundles and folders of timm's, both ways, with nothing lost."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import zoo
from tests.zoo.trained import BACKBONE, TINY, Prepare, bundle_of, card_of, make, timm_folder
from zoo.bundle import CARD, GOLDEN, check_golden, load_bundle
from zoo.card import Lineage, Preprocessing
from zoo.conversion import ConversionReport, convert

TAGGED = f"{BACKBONE}.augreg_in21k"
FIELDS: dict[str, Any] = {  # each of a card's, with a value that is not its default
    "backbone": TAGGED,
    "timm_kwargs": TINY | {"drop_rate": 0.1},
    "preprocessing": Preprocessing(
        size=(32, 32),
        mean=(0.1, 0.2, 0.3),
        std=(0.5, 0.6, 0.7),
        crop_pct=0.93,
        crop_mode="squash",
        interpolation="lanczos",
    ),
    "weights": "ema",
    "lineage": Lineage(run_id="r1", git_commit="abc", packages={"torch": "2"}),
    "metrics": {"val/top1": 0.5},
    "data_fingerprint": "f1",
}


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def by_timm(folder: Path) -> nn.Module:
    return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()


@pytest.mark.parametrize("attention", zoo.list_attentions())
def test_timm_and_back_is_the_same_bundle_to_the_last_byte(tmp_path: Path, attention: str) -> None:
    bundle_of(tmp_path / "first", attention, **FIELDS)
    convert(tmp_path / "first", tmp_path / "timm", "timm")
    convert(f"local-dir:{tmp_path / 'timm'}", tmp_path / "second", attention)
    assert contents(tmp_path / "second") == contents(tmp_path / "first")


@pytest.mark.parametrize("attention", zoo.list_attentions())
def test_a_bundle_of_one_variant_becomes_one_of_another(tmp_path: Path, attention: str, images: Tensor) -> None:
    source = bundle_of(tmp_path / "source", "parameter", **FIELDS)
    before = contents(source)
    report = convert(source, tmp_path / "new" / "bundle", attention)
    model, card = load_bundle(tmp_path / "new" / "bundle")
    assert card == load_bundle(source)[1].model_copy(update={"attention": attention})
    assert torch.equal(model(images), make()(images))
    assert check_golden(model, tmp_path / "new" / "bundle") == 0.0
    assert (report.before, report.after, report.difference, report.notes) == ("parameter", attention, 0.0, ())
    assert contents(source) == before


@pytest.mark.parametrize("attention", zoo.list_attentions())
def test_timm_loads_what_was_written_for_it_strictly(tmp_path: Path, attention: str, images: Tensor) -> None:
    report = convert(bundle_of(tmp_path / "bundle", attention, **FIELDS), tmp_path / "timm", "timm")
    model = by_timm(tmp_path / "timm")
    stock = make()
    assert torch.equal(model(images), stock(images))
    assert load_file(tmp_path / "timm" / "model.safetensors").keys() == stock.state_dict().keys()
    assert sorted(contents(tmp_path / "timm")) == ["config.json", "model.safetensors"]
    config = json.loads((tmp_path / "timm" / "config.json").read_text(encoding="utf-8"))
    assert (config["architecture"], config["num_classes"]) == ("vit_tiny_patch16_224", 3)
    assert config["label_names"] == ["ash", "日本 語", "oak"]
    look = config["pretrained_cfg"]
    assert (look["mean"], look["std"], look["crop_pct"]) == ([0.1, 0.2, 0.3], [0.5, 0.6, 0.7], 0.93)
    assert (look["interpolation"], look["crop_mode"], look["input_size"]) == ("lanczos", "squash", [3, 32, 32])
    assert not {"tag", "license", "hf_hub_id", "url"} & look.keys()  # of the weights that timm gives away
    assert (tmp_path / "timm" / "model.safetensors").stat().st_mode & 0o044
    resolved = timm.data.resolve_model_data_config(model)
    assert Preprocessing.from_timm(resolved) == FIELDS["preprocessing"]
    assert report.notes == (
        "lineage, metrics, fingerprint and EMA flag are in config.json under attention_zoo, which timm passes over",
    )
    assert str(report).splitlines()[0] == f"{tmp_path / 'bundle'} ({attention}) -> {tmp_path / 'timm'} (timm)"
    assert json.loads(json.dumps(report.to_dict()))["num_classes"] == 3


def tie_mlp(model: nn.Module) -> None:
    model.get_submodule("blocks.1.mlp.fc1").weight = model.get_submodule("blocks.0.mlp.fc1").weight


def tie_attention(model: nn.Module) -> None:
    first, second = (model.get_submodule(f"blocks.{i}.attn") for i in (0, 1))
    second.qkv, second.proj = first.qkv, first.proj


@pytest.mark.slow
@pytest.mark.parametrize("prepare", [tie_mlp, tie_attention])
def test_ties_survive_every_way(tmp_path: Path, prepare: Prepare, variant: str) -> None:
    first = bundle_of(tmp_path / "first", "parameter", prepare, **FIELDS)
    report = convert(first, tmp_path / "timm", "timm")
    assert "timm loads equal copies, not one tensor; the file keeps what is tied" in report.notes[1]
    assert count(by_timm(tmp_path / "timm")) == count(make())
    convert(tmp_path / "timm", tmp_path / "second", "parameter")
    assert contents(tmp_path / "second") == contents(first)
    convert(first, tmp_path / "other", variant)
    assert count(load_bundle(tmp_path / "other")[0]) == count(make(variant, prepare=prepare)) < count(make(variant))


def count(model: nn.Module) -> int:
    return len(list(model.parameters()))


@pytest.mark.parametrize(
    ("config", "names", "wanted", "said"),
    [
        ({}, None, ("class 0", "class 1", "class 2"), "classes are called class 0, class 1, ...: timm names none"),
        ({"label_names": ["a", "b", "c"]}, None, ("a", "b", "c"), None),
        ({"label_names": {"0": "a", "1": "b", "2": "c"}}, None, ("a", "b", "c"), None),
        ({"label_names": {"0": "a", "2": "c"}}, None, ("class 0", "class 1", "class 2"), "are not 3 names"),
        ({"label_names": ["a", "b"]}, None, ("class 0", "class 1", "class 2"), "are not 3 names"),
        ({"label_names": ["a", "b", "c"]}, ["x", "y", "z"], ("x", "y", "z"), None),
    ],
)
def test_a_folder_of_others_names_its_classes_or_gets_numbers(
    tmp_path: Path, config: dict[str, Any], names: list[str] | None, wanted: tuple[str, ...], said: str | None
) -> None:
    report = convert(timm_folder(tmp_path / "timm", **config), tmp_path / "bundle", "separate", class_names=names)
    card = load_bundle(tmp_path / "bundle")[1]
    assert card.class_names == wanted
    assert (card.preprocessing.size, card.preprocessing.mean) == ((32, 32), (0.5, 0.5, 0.5))
    assert card.lineage == Lineage()
    assert card.timm_kwargs == TINY
    assert [note for note in report.notes if "class" in note] == ([] if said is None else [report.notes[0]])
    assert said is None or said in report.notes[0]
    assert "no lineage, metrics or EMA flag" in report.notes[-1]


def test_what_was_changed_in_timms_fields_holds_and_the_rest_comes_from_our_key(tmp_path: Path) -> None:
    convert(bundle_of(tmp_path / "first", **FIELDS), tmp_path / "timm", "timm")
    config = json.loads((tmp_path / "timm" / "config.json").read_text(encoding="utf-8"))
    config["label_names"] = ["x", "y", "z"]
    config["pretrained_cfg"]["mean"] = [0.0, 0.0, 0.0]
    (tmp_path / "timm" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    convert(tmp_path / "timm", tmp_path / "second", "linear")
    card = load_bundle(tmp_path / "second")[1]
    assert (card.class_names, card.preprocessing.mean) == (("x", "y", "z"), (0.0, 0.0, 0.0))
    assert (card.lineage.run_id, card.weights, card.backbone) == ("r1", "ema", TAGGED)


@pytest.mark.parametrize(
    "change",
    [
        {"timm_kwargs": TINY | {"num_heads": 4}},
        {"backbone": "vit_small_patch16_224"},
        {"class_names": ("a", "b")},
    ],
)
def test_our_key_of_another_model_is_left_out_and_said(tmp_path: Path, change: dict[str, Any]) -> None:
    ours = card_of(**({"attention": "linear"} | FIELDS | change)).model_dump(mode="json")
    report = convert(timm_folder(tmp_path / "timm", attention_zoo=ours), tmp_path / "bundle", "linear")
    assert "config.json: attention_zoo tells of another model; its lineage and metrics were left out" in report.notes
    assert load_bundle(tmp_path / "bundle")[1].lineage == Lineage()


def test_timm_to_timm_is_the_same_weights(tmp_path: Path, images: Tensor) -> None:
    report = convert(timm_folder(tmp_path / "a", label_names=["a", "b", "c"]), tmp_path / "b", "timm")
    assert isinstance(report, ConversionReport)
    assert torch.equal(by_timm(tmp_path / "b")(images), by_timm(tmp_path / "a")(images))
    assert (CARD, GOLDEN) == ("card.json", "golden.safetensors")
    shutil.rmtree(tmp_path / "a")
    assert torch.equal(by_timm(tmp_path / "b")(images), make()(images))
