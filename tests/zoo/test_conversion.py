"""Bundles and folders of timm's, both ways, with nothing lost."""

import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import zoo
from zoo import conversion
from zoo.bundle import CARD, GOLDEN, WEIGHTS, check_golden, load_bundle, save_bundle
from zoo.card import Lineage, ModelCard, Preprocessing
from zoo.conversion import ConversionReport, convert
from zoo.errors import BackboneError, BundleError, SwapError, UnknownNameError
from zoo.files import timm_folders

BACKBONE = "vit_tiny_patch16_224.augreg_in21k"
KWARGS: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
CARD_FIELDS: dict[str, Any] = {
    "backbone": BACKBONE,
    "timm_kwargs": KWARGS | {"drop_rate": 0.1},
    "class_names": ("ash", "日本 語", "oak"),
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
Prepare = Callable[[nn.Module], object]


def make(attention: str, prepare: Prepare = nn.Module.eval, **kwargs: Any) -> nn.Module:
    model = zoo.create_model(BACKBONE, seed=1, **({"num_classes": 3} | KWARGS | kwargs))
    draws = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draws) * 0.1)
    prepare(model)
    zoo.swap_attention(model, attention)
    return model.eval()


def bundle_of(path: Path, attention: str = "parameter", prepare: Prepare = nn.Module.eval) -> Path:
    save_bundle(make(attention, prepare), ModelCard.model_validate(CARD_FIELDS | {"attention": attention}), path)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def by_timm(folder: Path) -> nn.Module:
    return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()


@pytest.mark.parametrize("attention", zoo.list_attentions())
def test_timm_and_back_is_the_same_bundle_to_the_last_byte(tmp_path: Path, attention: str) -> None:
    bundle_of(tmp_path / "first", attention)
    convert(tmp_path / "first", tmp_path / "timm", "timm")
    convert(f"local-dir:{tmp_path / 'timm'}", tmp_path / "second", attention)
    assert contents(tmp_path / "second") == contents(tmp_path / "first")


@pytest.mark.parametrize("attention", zoo.list_attentions())
def test_a_bundle_of_one_variant_becomes_one_of_another(tmp_path: Path, attention: str, images: Tensor) -> None:
    source = bundle_of(tmp_path / "source", "parameter")
    before = contents(source)
    report = convert(source, tmp_path / "new" / "bundle", attention)
    model, card = load_bundle(tmp_path / "new" / "bundle")
    assert card == load_bundle(source)[1].model_copy(update={"attention": attention})
    assert torch.equal(model(images), make("linear")(images))
    assert check_golden(model, tmp_path / "new" / "bundle") == 0.0
    assert (report.before, report.after, report.difference, report.notes) == ("parameter", attention, 0.0, ())
    assert contents(source) == before


@pytest.mark.parametrize("attention", zoo.list_attentions())
def test_timm_loads_what_was_written_for_it_strictly(tmp_path: Path, attention: str, images: Tensor) -> None:
    report = convert(bundle_of(tmp_path / "bundle", attention), tmp_path / "timm", "timm")
    model = by_timm(tmp_path / "timm")
    stock = make("linear")
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
    assert Preprocessing.from_timm(resolved) == CARD_FIELDS["preprocessing"]
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
    first = bundle_of(tmp_path / "first", "parameter", prepare)
    report = convert(first, tmp_path / "timm", "timm")
    assert "timm loads equal copies, not one tensor; the file keeps what is tied" in report.notes[1]
    assert count(by_timm(tmp_path / "timm")) == count(make("linear"))
    convert(tmp_path / "timm", tmp_path / "second", "parameter")
    assert contents(tmp_path / "second") == contents(first)
    convert(first, tmp_path / "other", variant)
    assert count(load_bundle(tmp_path / "other")[0]) == count(make(variant, prepare)) < count(make(variant))


def count(model: nn.Module) -> int:
    return len(list(model.parameters()))


def timm_folder(folder: Path, **config: Any) -> Path:
    """Write a folder as others write it: no key of ours, a configuration that holds what it must."""
    folder.mkdir()
    save_file(make("linear").state_dict(), folder / "model.safetensors")
    known = {"architecture": "vit_tiny_patch16_224", "model_args": KWARGS, "num_classes": 3}
    known |= {"pretrained_cfg": {"input_size": [3, 32, 32], "mean": [0.5] * 3, "std": [0.5] * 3, "classifier": "head"}}
    (folder / "config.json").write_text(json.dumps(known | config), encoding="utf-8")
    return folder


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
    assert card.timm_kwargs == KWARGS
    assert [note for note in report.notes if "class" in note] == ([] if said is None else [report.notes[0]])
    assert said is None or said in report.notes[0]
    assert "no lineage, metrics or EMA flag" in report.notes[-1]


def test_what_was_changed_in_timms_fields_holds_and_the_rest_comes_from_our_key(tmp_path: Path) -> None:
    convert(bundle_of(tmp_path / "first"), tmp_path / "timm", "timm")
    config = json.loads((tmp_path / "timm" / "config.json").read_text(encoding="utf-8"))
    config["label_names"] = ["x", "y", "z"]
    config["pretrained_cfg"]["mean"] = [0.0, 0.0, 0.0]
    (tmp_path / "timm" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    convert(tmp_path / "timm", tmp_path / "second", "linear")
    card = load_bundle(tmp_path / "second")[1]
    assert (card.class_names, card.preprocessing.mean) == (("x", "y", "z"), (0.0, 0.0, 0.0))
    assert (card.lineage.run_id, card.weights, card.backbone) == ("r1", "ema", BACKBONE)


@pytest.mark.parametrize(
    "change",
    [
        {"timm_kwargs": KWARGS | {"num_heads": 4}},
        {"backbone": "vit_small_patch16_224"},
        {"class_names": ("a", "b")},
    ],
)
def test_our_key_of_another_model_is_left_out_and_said(tmp_path: Path, change: dict[str, Any]) -> None:
    ours = ModelCard.model_validate(CARD_FIELDS | change).model_dump(mode="json")
    report = convert(timm_folder(tmp_path / "timm", attention_zoo=ours), tmp_path / "bundle", "linear")
    assert "config.json: attention_zoo tells of another model; its lineage and metrics were left out" in report.notes
    assert load_bundle(tmp_path / "bundle")[1].lineage == Lineage()


def test_our_key_that_is_no_card_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"timm: backbone: Field required"):
        convert(timm_folder(tmp_path / "timm", attention_zoo={"format_version": 1}), tmp_path / "bundle", "linear")


REFUSED: list[tuple[Callable[[Path], str | Path], str, type[Exception], str]] = [
    (lambda t: t / "none", "linear", BundleError, "none: nothing is there; wanted a bundle, a folder of timm's"),
    (lambda _: "local-dir:none", "linear", BackboneError, "no config.json in none"),
    (lambda t: t, "linear", BundleError, r"neither card\.json nor config\.json is there"),
    (lambda t: bundle_of(t / "b") / WEIGHTS, "linear", BundleError, "a file; wanted a bundle"),
    (lambda t: bundle_of(t / "b"), "linaer", UnknownNameError, "unknown attention 'linaer', did you mean 'linear'"),
    (lambda t: bundle_of(t / "b"), "tim", UnknownNameError, "did you mean 'timm'"),
    (lambda t: damaged(bundle_of(t / "b") / WEIGHTS), "timm", BundleError, r"model\.safetensors: truncated"),
    (lambda t: damaged(timm_folder(t / "b") / WEIGHTS), "linear", BackboneError, r"model\.safetensors: truncated"),
    (lambda t: step(t / "step-1"), "linear", BundleError, "a training's checkpoint; convert the bundle"),
    (lambda _: "vit_tiny_patch16_22", "timm", UnknownNameError, "did you mean 'vit_tiny_patch16_224'"),
    (
        lambda _: "test_vit4",
        "linear",
        BackboneError,
        "timm has no pretrained weights for it; add a tag",
    ),
    (
        lambda t: timm_folder(t / "b", num_classes=5),
        "linear",
        BundleError,
        "not all of it is trained: head: replaced, 3 -> 5",
    ),
]


def damaged(file: Path) -> Path:
    file.write_bytes(file.read_bytes()[:-10])
    return file.parent


def step(folder: Path) -> Path:
    folder.mkdir()
    (folder / "state.json").write_text("{}", encoding="utf-8")
    return folder


@pytest.mark.parametrize(("source", "attention", "error", "message"), REFUSED)
def test_what_cannot_be_converted_is_named_and_nothing_is_written(
    tmp_path: Path, source: Callable[[Path], str | Path], attention: str, error: type[Exception], message: str
) -> None:
    given = source(tmp_path)
    with pytest.raises(error, match=message) as caught:
        convert(given, tmp_path / "new", attention)
    assert "\n" not in str(caught.value)
    assert not [path for path in tmp_path.iterdir() if "new" in path.name]


def test_a_bundle_takes_no_class_names_and_a_folder_takes_as_many_as_it_has(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="a bundle has class names of its own"):
        convert(bundle_of(tmp_path / "b"), tmp_path / "new", "linear", class_names=["a", "b", "c"])
    with pytest.raises(BundleError, match="class_names: got 2, the model has 3 classes"):
        convert(timm_folder(tmp_path / "t"), tmp_path / "new", "linear", class_names=["a", "b"])
    with pytest.raises(BundleError, match="class names must be unique"):
        convert(timm_folder(tmp_path / "t2"), tmp_path / "new", "linear", class_names=["a", "b", "a"])


@pytest.mark.parametrize("attention", ["timm", "linear"])
@pytest.mark.parametrize("existing", ["folder", "file", "dangling"])
def test_nothing_is_overwritten(tmp_path: Path, attention: str, existing: str) -> None:
    target = tmp_path / "there"
    {"folder": Path.mkdir, "file": Path.touch, "dangling": lambda p: p.symlink_to("nowhere")}[existing](target)
    with pytest.raises(BundleError, match="there: exists already; nothing is overwritten"):
        convert(bundle_of(tmp_path / "b"), target, attention)
    assert os.path.lexists(target)
    assert target.is_symlink() == (existing == "dangling")


@contextmanager
def full_disk() -> Iterator[None]:
    """Let no file grow beyond 20 kB, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("attention", ["timm", "linear"])
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, attention: str) -> None:
    bundle_of(tmp_path / "b")
    with full_disk(), pytest.raises(BundleError, match=r"new: cannot be written \(.*\); nothing is left there"):
        convert(tmp_path / "b", tmp_path / "new", attention)
    assert names_in(tmp_path) == ["b"]


@pytest.mark.parametrize("attention", ["timm", "linear"])
def test_a_destination_that_cannot_be_made_is_one_line(tmp_path: Path, attention: str) -> None:
    bundle_of(tmp_path / "b")
    (tmp_path / "file").touch()
    with pytest.raises(BundleError, match=r"file/new: cannot be written \(Not a directory|file/new: cannot be written"):
        convert(tmp_path / "b", tmp_path / "file" / "new", attention)
    with pytest.raises(BundleError, match=r"/proc/new: cannot be written"):
        convert(tmp_path / "b", "/proc/new", attention)


def test_a_conversion_that_changes_the_function_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(model: nn.Module) -> None:
        zoo.restore_attention(model)
        nn.init.normal_(model.get_parameter("blocks.0.attn.qkv.weight"))

    monkeypatch.setattr(conversion, "restore_attention", forget)
    bundle_of(tmp_path / "b")
    with pytest.raises(BundleError, match="logits differ by"):
        convert(tmp_path / "b", tmp_path / "new", "timm")
    assert names_in(tmp_path) == ["b"]


def test_a_folder_that_timm_loads_otherwise_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose_a_bit(file: Path, state: dict[str, Tensor], **_: bool) -> dict[str, str]:
        wrong = {name: tensor.clone() for name, tensor in state.items()}
        wrong["norm.bias"][0] += 1e-6
        save_file(wrong, file)
        return {}

    monkeypatch.setattr(timm_folders, "write_tensors", lose_a_bit)
    bundle_of(tmp_path / "b")
    with pytest.raises(BundleError, match=r"new: timm loads another norm\.bias than was saved"):
        convert(tmp_path / "b", tmp_path / "new", "timm")
    assert names_in(tmp_path) == ["b"]


@pytest.mark.usefixtures("own_registry")
def test_attention_that_stock_timm_has_not_is_refused(tmp_path: Path) -> None:
    @zoo.register_attention("tempered")
    class Tempered(zoo.Attention):
        projection = "separate"

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.temperature = nn.Parameter(torch.ones(self.num_heads, 1, 1))

    bundle_of(tmp_path / "b", "tempered")
    with pytest.raises(SwapError, match=r"blocks\.0\.attn\.temperature is a parameter of Tempered alone"):
        convert(tmp_path / "b", tmp_path / "new", "timm")
    assert names_in(tmp_path) == ["b"]


def test_timm_to_timm_is_the_same_weights(tmp_path: Path, images: Tensor) -> None:
    report = convert(timm_folder(tmp_path / "a", label_names=["a", "b", "c"]), tmp_path / "b", "timm")
    assert isinstance(report, ConversionReport)
    assert torch.equal(by_timm(tmp_path / "b")(images), by_timm(tmp_path / "a")(images))
    assert (CARD, GOLDEN) == ("card.json", "golden.safetensors")
    shutil.rmtree(tmp_path / "a")
    assert torch.equal(by_timm(tmp_path / "b")(images), make("linear")(images))
