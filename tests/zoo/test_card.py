import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import timm
from pydantic import ValidationError

from zoo.card import Lineage, ModelCard, PluginSource, Preprocessing, read_card, write_card
from zoo.errors import BundleError

PREPROCESSING = Preprocessing(size=(32, 48), crop_pct=0.9, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))


@pytest.fixture
def card() -> ModelCard:
    return ModelCard(
        backbone="vit_tiny_patch16_224",
        timm_kwargs={"img_size": [32, 48], "embed_dim": 32, "drop_rate": 0.1, "act_layer": None},
        attention="parameter",
        class_names=("日本語", "é", "ash"),
        preprocessing=PREPROCESSING,
        weights="ema",
        lineage=Lineage(run_id="r1", git_commit="c0ffee", packages={"torch": "2.14.1"}),
        metrics={"val/top1": 0.97},
        data_fingerprint="f1",
    )


def changed(card: ModelCard, path: Path, **fields: object) -> Path:
    path.write_text(json.dumps(json.loads(card.model_dump_json()) | fields), encoding="utf-8")
    return path


def test_card_survives_writing_and_reading(card: ModelCard, tmp_path: Path) -> None:
    write_card(card, tmp_path / "card.json")
    assert read_card(tmp_path / "card.json") == card
    assert "日本語" in (tmp_path / "card.json").read_text(encoding="utf-8")


def test_every_default_is_valid_as_json() -> None:
    card = ModelCard(backbone="b", class_names=("a", "b"), preprocessing=PREPROCESSING)
    assert ModelCard.model_validate_json(card.model_dump_json()) == card


def test_plugins_are_read_as_they_were_written_and_as_the_names_of_older_cards(card: ModelCard, tmp_path: Path) -> None:
    path = changed(card, tmp_path / "card.json", plugins=["my_pkg.attention", {"name": "x.py", "sha256": "0" * 64}])
    read = read_card(path)
    assert read.plugins == (PluginSource(name="my_pkg.attention"), PluginSource(name="x.py", sha256="0" * 64))
    write_card(read, path)
    assert read_card(path) == read


@pytest.mark.slow
def test_class_names_outside_ascii_survive_under_the_c_locale(card: ModelCard, tmp_path: Path) -> None:
    write_card(card, tmp_path / "card.json")
    code = (
        "import sys, pathlib; from zoo.card import read_card, write_card\n"
        "write_card(read_card(pathlib.Path(sys.argv[1])), pathlib.Path(sys.argv[2]))\n"
        "assert 'torch' not in sys.modules"
    )
    paths = [str(tmp_path / "card.json"), str(tmp_path / "again.json")]
    env = os.environ | {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code, *paths], env=env, check=True)
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "card.json").read_bytes()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format_version": 3, "shape_of_things": 1}, r"format_version 3 is newer than 2.*upgrade"),
        ({"format_version": "1"}, "format_version: .*valid integer"),
        ({"format_version": 0}, "format_version: "),
        ({"class_names": ["a", "b", "a"]}, "class_names: .*unique, got 'a'"),
        ({"class_names": ["a"]}, "class_names: .*at least 2"),
        ({"class_names": ["a", ""]}, r"class_names\.1: "),
        ({"class_names": "ab"}, "class_names: "),
        ({"weights": "best"}, "weights: .*'raw' or 'ema'"),
        ({"wieghts": "raw"}, "wieghts: Extra inputs"),
        ({"backbone": None}, "backbone: .*valid string"),
        ({"timm_kwargs": {"num_classes": 3}}, "timm_kwargs: .*leave num_classes out"),
        ({"timm_kwargs": {"checkpoint_path": "x.pth"}}, "timm_kwargs: .*leave checkpoint_path out"),
        ({"backbone": "local-dir:/tmp/x"}, "backbone: .*points outside the bundle"),
        ({"metrics": {"val/top1": "0.9"}}, "metrics.val/top1: .*valid number"),
        ({"plugins": [""]}, r"plugins\.0\.name: .*at least 1"),
        ({"plugins": [{"name": "x.py", "sha256": "abc"}]}, r"plugins\.0\.sha256: "),
        ({"plugins": [{"nmae": "x.py"}]}, r"plugins\.0\.name: Field required; plugins\.0\.nmae: Extra"),
        ({"plugins": [3]}, r"plugins\.0: "),
        ({"preprocessing": {}}, r"preprocessing\.size: Field required"),
    ],
)
def test_read_card_names_the_field_at_fault(
    card: ModelCard, tmp_path: Path, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(BundleError, match=message) as caught:
        read_card(changed(card, tmp_path / "card.json", **fields))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("size", [0, 32]),
        ("size", [32]),
        ("crop_pct", 0),
        ("crop_mode", "centre"),
        ("std", [0.5, 0.0, 0.5]),
        ("interpolation", "random"),
    ],
)
def test_preprocessing_out_of_range_is_refused(card: ModelCard, tmp_path: Path, field: str, value: object) -> None:
    preprocessing = json.loads(PREPROCESSING.model_dump_json()) | {field: value}
    with pytest.raises(BundleError, match=rf"preprocessing\.{field}"):
        read_card(changed(card, tmp_path / "card.json", preprocessing=preprocessing))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "JSON: "),
        (b"{", "JSON: "),
        (b"[]", "object"),
        (b"\xff\xfe", "cannot read the card"),
        (b"{}", "format_ver"),
    ],
)
def test_a_file_that_is_no_card_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "card.json").write_bytes(content)
    with pytest.raises(BundleError, match=message):
        read_card(tmp_path / "card.json")


def test_a_missing_card_is_named(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"card\.json: cannot read the card"):
        read_card(tmp_path / "card.json")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_json_cannot_hold_are_refused(bad: float) -> None:
    with pytest.raises(ValidationError, match=r"metrics\.val/loss"):
        ModelCard(backbone="b", class_names=("a", "b"), preprocessing=PREPROCESSING, metrics={"val/loss": bad})
    with pytest.raises(ValidationError, match="timm_kwargs"):
        ModelCard(backbone="b", class_names=("a", "b"), preprocessing=PREPROCESSING, timm_kwargs={"x": [bad]})


def test_a_class_name_that_utf8_cannot_hold_is_refused_before_anything_is_written() -> None:
    with pytest.raises(ValidationError, match="class_names"):
        ModelCard(backbone="b", class_names=("a", os.fsdecode(b"caf\xe9")), preprocessing=PREPROCESSING)


def test_from_timm_reads_what_timm_resolves() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=1, num_heads=2)
    read = Preprocessing.from_timm(timm.data.resolve_model_data_config(model, args={"img_size": 32}))
    assert read == Preprocessing(size=(32, 32), crop_pct=0.9, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_size": (1, 8, 8)}, "3 channels here, got 1"),
        ({"mean": (0.5,)}, r"\['mean'\]: three numbers"),
        ({"crop_mode": "middle"}, "crop_mode"),
    ],
)
def test_from_timm_refuses_what_a_card_cannot_hold(changes: dict[str, object], message: str) -> None:
    config = {"input_size": (3, 8, 8), "crop_pct": 1.0, "crop_mode": "center", "interpolation": "bicubic"}
    config |= {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    with pytest.raises(ValueError, match=message):
        Preprocessing.from_timm(config | changes)
    with pytest.raises(ValueError, match="lacks mean, std"):
        Preprocessing.from_timm({k: v for k, v in config.items() if k not in ("mean", "std")})
