"""What stands for BACKBONE: timm names, folders and bundles; and what is told of what is none of them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from tests.zoo.trained import BACKBONE, TINY, bundle_of
from zoo.card import Lineage
from zoo.commands.subjects import load_subject
from zoo.errors import BackboneError, BundleError, UnknownNameError, ZooError


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """Write a bundle of three classes, trained by a run."""
    return bundle_of(
        tmp_path / "bundle",
        weights="ema",
        lineage=Lineage(run_id="r1", git_commit="abc"),
        metrics={"val/top1": 0.25},
    )


def test_a_timm_name_is_built_as_asked() -> None:
    subject = load_subject(BACKBONE, "separate", init="torch", seed=3, timm_kwargs=TINY | {"in_chans": 1})
    assert subject.title.startswith(f"{BACKBONE}, img_size=32, patch_size=8")
    assert subject.title.endswith(": separate, drawn by torch, seed 3")
    assert (subject.init, subject.is_trained, subject.image_shape) == ("torch", False, (1, 32, 32))
    json.dumps(subject.facts)
    weight = subject.model.get_parameter("blocks.0.attn.qkv.to_q.weight")
    same = zoo.create_model(BACKBONE, "separate", init="torch", seed=3, **TINY)
    assert torch.equal(weight, same.get_parameter("blocks.0.attn.qkv.to_q.weight"))


@pytest.mark.parametrize(
    ("img_size", "shape"), [([48, 32], (3, 48, 32)), ((48, 32), (3, 48, 32)), (None, (3, 224, 224))]
)
def test_the_images_shape_is_the_models(img_size: Any, shape: tuple[int, ...]) -> None:
    kwargs = TINY | {"img_size": img_size} if img_size else {"embed_dim": 32, "depth": 2, "num_heads": 2}
    subject = load_subject(BACKBONE, "linear", timm_kwargs=kwargs)
    assert subject.image_shape == shape
    assert subject.model(torch.zeros(1, *shape)).shape == (1, 1000)


def test_a_bundle_brings_its_attention_and_its_story(bundle: Path) -> None:
    subject = load_subject(str(bundle), None)
    assert subject.title.splitlines() == [
        f"bundle {bundle}: {BACKBONE}, img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2: parameter, "
        "weights averaged (EMA)",
        "3 classes, images of 32 x 32 pixels",
        "run r1, commit abc, val/top1 0.25",
    ]
    assert (subject.init, subject.is_trained, subject.image_shape) == (None, True, (3, 32, 32))
    assert (subject.facts["attention"], subject.facts["bundle"]["path"]) == ("parameter", str(bundle))
    assert json.loads(json.dumps(subject.facts))["bundle"]["class_names"][1] == "日本 語"
    assert load_subject(str(bundle), "parameter").facts == subject.facts


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"attention": "linear"}, "holds attention 'parameter', not 'linear'; leave --attention out, or convert"),
        ({"init": "torch"}, "a bundle has weights and arguments of its own; leave --init out"),
        ({"pretrained": True}, "leave --pretrained out"),
        ({"timm_kwargs": {"depth": 3}}, "leave --model-kwargs out"),
    ],
)
def test_what_does_not_belong_to_a_bundle_is_named(bundle: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ZooError, match=f"^{re.escape(str(bundle))}: .*{said}"):
        load_subject(str(bundle), **({"attention": None} | options))


def test_a_damaged_bundle_is_named(bundle: Path) -> None:
    (bundle / "card.json").write_text("{}", encoding="utf-8")
    with pytest.raises(BundleError, match=r"card\.json: not a model card"):
        load_subject(str(bundle), None)


def test_a_folder_of_timms_gives_its_trained_weights(bundle: Path, tmp_path: Path) -> None:
    zoo.convert(bundle, tmp_path / "timm", "timm")
    subject = load_subject(f"local-dir:{tmp_path / 'timm'}", "separate", pretrained=True)
    assert subject.is_trained
    assert "weights of" in subject.title
    assert subject.image_shape == (3, 32, 32)
    with pytest.raises(BackboneError, match="a folder of timm's; write local-dir:"):
        load_subject(str(tmp_path / "timm"), "separate")


def test_weights_of_a_file_say_what_was_adapted(bundle: Path) -> None:
    subject = load_subject(BACKBONE, "separate", pretrained=str(bundle), timm_kwargs=TINY | {"num_classes": 7})
    assert subject.facts["pretrained"]["source"] == str(bundle / "model.safetensors")
    assert subject.facts["pretrained"]["adapted"] != []
    assert len(subject.title.splitlines()) == 1 + len(subject.facts["pretrained"]["adapted"])
    assert "head" in subject.title


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "BACKBONE '' is empty; wanted a timm name"),
        (" ", "BACKBONE ' ' is empty"),
        ("a_file", "a_file: a file; wanted a timm name"),
        ("a_folder", "a_folder: a directory without card.json; wanted a timm name"),
        ("./nothing", "nothing: nothing is there; wanted a timm name"),
        ("nothing/bundle", "nothing/bundle: nothing is there"),
        ("training", "training: a training's checkpoint; give the bundle that the training wrote"),
    ],
)
def test_what_is_no_backbone_is_named_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    (tmp_path / "a_file").touch()
    (tmp_path / "a_folder").mkdir()
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "state.json").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BackboneError, match=re.escape(said)):
        load_subject(name, "linear")


@pytest.mark.parametrize("name", ["vit_tiny_patch16_22", "日本", "a\nb", "x" * 5000, "vit tiny"])
def test_an_unknown_name_is_an_unknown_backbone(name: str) -> None:
    with pytest.raises(UnknownNameError, match=r"^unknown backbone "):
        load_subject(name, "linear")


def test_a_timm_name_wants_an_attention() -> None:
    with pytest.raises(ZooError, match=r"--attention is missing: linear, .*only a bundle names its own"):
        load_subject(BACKBONE, None)
