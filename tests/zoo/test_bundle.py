import errno
import json
import pickle
import resource
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import zoo
from zoo.bundle import CARD, GOLDEN, WEIGHTS, check_golden, load_bundle, save_bundle
from zoo.card import ModelCard, Preprocessing
from zoo.errors import BundleError
from zoo.files import tensor_files
from zoo.files.bundle_files import digest

KWARGS = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
CARD_FIELDS = {
    "backbone": "vit_tiny_patch16_224",
    "timm_kwargs": KWARGS,
    "class_names": ("ash", "日本語", "oak"),
    "preprocessing": Preprocessing(size=(32, 32), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)),
}


def make(attention: str = "parameter") -> tuple[nn.Module, ModelCard]:
    model = zoo.create_model("vit_tiny_patch16_224", attention, seed=1, num_classes=3, **KWARGS)
    with torch.no_grad():  # timm starts heads at zero, biases too: nothing would show in the logits
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) * 0.1)
    return model, ModelCard.model_validate(CARD_FIELDS | {"attention": attention})


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    save_bundle(*make(), tmp_path / "bundle")
    return tmp_path / "bundle"


def read(file: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in load_file(file).items()}  # load_file maps the file itself


def rewrite(file: Path, change: Callable[[dict[str, torch.Tensor]], object] = len, **metadata: str) -> None:
    tensors = read(file)
    change(tensors)
    save_file(tensors, file, metadata=metadata)


def edit_card(bundle: Path, **fields: object) -> None:
    card = json.loads((bundle / CARD).read_text(encoding="utf-8")) | fields
    (bundle / CARD).write_text(json.dumps(card), encoding="utf-8")


@pytest.mark.parametrize("attention", zoo.list_attentions())
def test_a_bundle_gives_back_the_model_bit_for_bit(tmp_path: Path, attention: str) -> None:
    model, card = make(attention)
    save_bundle(model, card, tmp_path / "new" / "bundle")
    loaded, its_card = load_bundle(tmp_path / "new" / "bundle")
    assert its_card == card
    assert not any(module.training for module in loaded.modules())
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    assert check_golden(loaded, tmp_path / "new" / "bundle") == 0.0
    assert sorted(file.name for file in (tmp_path / "new" / "bundle").iterdir()) == [CARD, GOLDEN, WEIGHTS]


def test_raw_matrices_keep_their_names_in_the_file(bundle: Path) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(bundle / WEIGHTS).items()}
    raw = [name for name in shapes if name.startswith("blocks.0.attn.") and shapes[name] == (32, 32)]
    assert [name.rpartition(".")[2] for name in sorted(raw)] == ["projection", "to_k", "to_q", "to_v"]


def test_the_golden_example_is_the_same_every_time(bundle: Path, tmp_path: Path) -> None:
    save_bundle(*make(), tmp_path / "again")
    for name in (WEIGHTS, CARD, GOLDEN):
        assert (bundle / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_saving_and_loading_leave_modes_and_random_stream_alone(tmp_path: Path) -> None:
    model, card = make()
    model.train()
    model.get_submodule("blocks.1").eval()
    modes = [module.training for module in model.modules()]
    stream = torch.get_rng_state()
    save_bundle(model, card, tmp_path / "bundle")
    load_bundle(tmp_path / "bundle")
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), stream)


def test_others_may_read_a_bundle(bundle: Path) -> None:
    for file in (bundle, *bundle.iterdir()):
        assert file.stat().st_mode & stat.S_IROTH, file


def test_tied_weights_are_stored_once_and_come_back_tied(tmp_path: Path) -> None:
    model, card = make()
    first, second = model.get_submodule("blocks.0.mlp.fc1"), model.get_submodule("blocks.1.mlp.fc1")
    second.weight = first.weight
    save_bundle(model, card, tmp_path / "bundle")
    assert "blocks.1.mlp.fc1.weight" not in load_file(tmp_path / "bundle" / WEIGHTS)
    with safe_open(tmp_path / "bundle" / WEIGHTS, framework="pt") as opened:
        assert "blocks.1.mlp.fc1.weight" in opened.metadata()["ties"]
    loaded, _ = load_bundle(tmp_path / "bundle")
    assert loaded.get_parameter("blocks.1.mlp.fc1.weight") is loaded.get_parameter("blocks.0.mlp.fc1.weight")
    assert torch.equal(loaded.get_parameter("blocks.1.mlp.fc1.weight"), first.weight)
    assert check_golden(loaded, tmp_path / "bundle") == 0.0


def test_an_existing_path_is_left_as_it_is(bundle: Path) -> None:
    before = {file.name: file.read_bytes() for file in bundle.iterdir()}
    with pytest.raises(BundleError, match="exists already"):
        save_bundle(*make("linear"), bundle)
    assert {file.name: file.read_bytes() for file in bundle.iterdir()} == before


def nan(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("blocks.1.norm1.weight")[3] = float("nan")


def untold_tie(model: nn.Module) -> None:
    weight = model.get_submodule("blocks.0.mlp.fc1").weight
    model.get_submodule("blocks.0.mlp.fc2").weight = nn.Parameter(weight.detach().t())


@pytest.mark.parametrize(
    ("change", "fields", "message"),
    [
        (nan, {}, "blocks.1.norm1.weight holds NaN or Inf"),
        (untold_tie, {}, "blocks.0.mlp.fc1.weight and blocks.0.mlp.fc2.weight share memory"),
        (nn.Module.bfloat16, {}, r"cls_token is torch\.bfloat16; bundles hold float32"),
        (None, {"class_names": ("a", "b")}, r"logits: got \(1, 3\), wanted \(1, 2\) by the card's 2 class_names"),
        (None, {"attention": "separate"}, r"blocks\.0\.attn\.proj\.bias is missing"),
        (None, {"backbone": "vit_tiny_patch16_225"}, "unknown backbone 'vit_tiny_patch16_225'"),
        (None, {"timm_kwargs": KWARGS | {"depth": 3}}, r"blocks\.2\.\S+ is missing"),
        (None, {"timm_kwargs": KWARGS | {"depht": 2}}, "depht"),
        (None, {"timm_kwargs": KWARGS | {"class_token": False, "global_pool": "avg"}}, "cls_token is not the model's"),
        (None, {"timm_kwargs": KWARGS | {"num_heads": 4}}, "logits differ by"),
        (
            None,
            {"preprocessing": Preprocessing(size=(24, 24), mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))},
            r"refuses an input of \(1, 3, 24, 24\)",
        ),
    ],
)
def test_what_would_not_load_is_not_saved(
    tmp_path: Path, change: Callable[[nn.Module], object] | None, fields: dict[str, object], message: str
) -> None:
    model, card = make()[0], ModelCard.model_validate(CARD_FIELDS | {"attention": "parameter"} | fields)
    if change:
        change(model)
    with pytest.raises(BundleError, match=message) as caught:
        save_bundle(model, card, tmp_path / "bundle")
    assert ".partial" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def as_pickle(file: Path) -> None:
    file.write_bytes(pickle.dumps(read(file)))


def replace(file: Path, put: Callable[[Path], object]) -> None:
    file.unlink()
    put(file)


def spoil(tensors: dict[str, torch.Tensor]) -> None:
    tensors["norm.weight"][0] = float("nan")


def with_new_hashes(bundle: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the weights as somebody would who makes the hashes fit."""
    rewrite(bundle / WEIGHTS, change, ties="{}")
    rewrite(bundle / GOLDEN, sha256=json.dumps({name: digest(bundle / name) for name in (WEIGHTS, CARD)}))


DAMAGE = [
    (lambda b: (b / CARD).unlink(), r"card\.json: cannot read the card"),
    (lambda b: (b / WEIGHTS).unlink(), r"model\.safetensors: missing"),
    (lambda b: (b / GOLDEN).unlink(), r"golden\.safetensors: missing"),
    (lambda b: truncate(b / WEIGHTS), r"model\.safetensors: truncated"),
    (lambda b: truncate(b / GOLDEN), r"golden\.safetensors: truncated"),
    (lambda b: (b / WEIGHTS).write_bytes(b""), r"model\.safetensors: truncated"),
    (lambda b: as_pickle(b / WEIGHTS), "a pickle, not safetensors; weights of another format are never read"),
    (
        lambda b: torch.save(read(b / WEIGHTS), b / WEIGHTS),
        "a pickle, not safetensors; weights of another format are never read",
    ),
    (lambda b: rewrite(b / WEIGHTS, lambda t: t.pop("head.bias")), "head.bias is missing"),
    (lambda b: rewrite(b / WEIGHTS, lambda t: t.update(extra=torch.ones(1))), "extra is not the model's"),
    (
        lambda b: rewrite(b / WEIGHTS, lambda t: t.update({"norm.weight": t["norm.weight"][1:].clone()})),
        r"norm\.weight: got \(31,\) float32, wanted \(32,\) float32",
    ),
    (
        lambda b: rewrite(b / WEIGHTS, lambda t: t.update({"norm.weight": t["norm.weight"].half()})),
        r"norm\.weight: got \(32,\) float16, wanted \(32,\) float32",
    ),
    (lambda b: rewrite(b / WEIGHTS, ties='{"a": "b"}'), "list of tied tensors is damaged"),
    (lambda b: rewrite(b / WEIGHTS, ties="["), "list of tied tensors is damaged"),
    (lambda b: rewrite(b / GOLDEN, lambda t: t.pop("logits")), "logits: got nothing"),
    (lambda b: edit_card(b, format_version=2), "format_version 2 is newer"),
    (lambda b: edit_card(b, class_names=["a", "b", "c", "d"]), "the card's 4 class_names"),
    (lambda b: edit_card(b, attention="parametr"), "unknown attention 'parametr', did you mean 'parameter'"),
    (
        lambda b: edit_card(b, attention="mine", plugins=["my_pkg"]),
        r"attention 'mine' is not registered here: it needs .* my_pkg",
    ),
    (lambda b: edit_card(b, attention_options={"x": 1}), "attention_options"),
    (lambda b: edit_card(b, timm_kwargs=KWARGS | {"embed_dim": 10**6}), r"does not fit the card: .*wanted \(.*1000000"),
    (lambda b: edit_card(b, timm_kwargs=KWARGS | {"num_heads": 0}), "timm cannot build it with .*num_heads=0"),
    (lambda b: edit_card(b, metrics="x" * 16_000_000), r"card\.json: not a model card: more than 16,000,000 bytes"),
    (lambda b: (b / CARD).write_text("[" * 100_000), r"card\.json: not a model card: JSON: "),
    (lambda b: (b / CARD).write_text('{"format_version": 1, "x": ' + "[" * 100_000), "not a model card"),
    (lambda b: (b / CARD).write_bytes(b'{"format_version": "\xff"}'), r"card\.json: cannot read the card .*utf-8"),
    (lambda b: (b / CARD).write_bytes(b""), r"card\.json: not a model card: JSON: "),
    (lambda b: replace(b / CARD, Path.mkdir), r"card\.json: cannot read the card .*directory"),
    (lambda b: replace(b / WEIGHTS, Path.mkdir), r"model\.safetensors: a directory, a safetensors file is wanted"),
    (
        lambda b: replace(b / WEIGHTS, lambda f: f.symlink_to(f)),
        r"model\.safetensors: cannot be read \(Too many levels",
    ),
    (lambda b: (b / WEIGHTS).write_bytes((2**63).to_bytes(8, "little")), r"model\.safetensors: truncated"),
    (lambda b: with_new_hashes(b, spoil), r"model\.safetensors: norm\.weight holds NaN or Inf"),
    (lambda b: rewrite(b / GOLDEN, sha256="[" * 100_000), r"model\.safetensors: damaged"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_every_damage_is_named(bundle: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(bundle)
    with pytest.raises(BundleError, match=message) as caught:
        load_bundle(bundle)
    assert "\n" not in str(caught.value)


def test_a_pickle_beside_the_weights_is_not_looked_at(bundle: Path) -> None:
    (bundle / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    load_bundle(bundle)


class Trap:
    """Fails the test that unpickles it."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return pytest.fail, ("unpickled",)


@pytest.mark.parametrize("name", [WEIGHTS, GOLDEN])
def test_a_pickle_in_the_place_of_a_file_is_not_run(bundle: Path, name: str) -> None:
    (bundle / name).write_bytes(pickle.dumps(Trap()))
    with pytest.raises(BundleError, match=f"{name}: a pickle, not safetensors"):
        load_bundle(bundle)


def test_a_card_that_asks_for_more_than_the_weights_hold_allocates_nothing(bundle: Path) -> None:
    edit_card(bundle, timm_kwargs=KWARGS | {"mlp_ratio": 30_000})  # 250 MB a layer
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BundleError, match=r"blocks\.0\.mlp\.fc1\.bias: got \(128,\) float32, wanted \(960000,\)"):
        load_bundle(bundle)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


@pytest.mark.parametrize("name", [WEIGHTS, GOLDEN])
def test_a_disk_that_fills_up_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real = save_file

    def fill_up(tensors: dict[str, torch.Tensor], file: Path, metadata: dict[str, str]) -> None:
        if file.name == name:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(tensors, file, metadata)

    monkeypatch.setattr(tensor_files, "save_file", fill_up)
    monkeypatch.setattr(zoo.bundle, "save_file", fill_up)
    with pytest.raises(BundleError, match=r"bundle: cannot be written \(No space left on device\); nothing is left"):
        save_bundle(*make(), tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_one_line() -> None:
    with pytest.raises(BundleError, match=r"/proc/bundle: cannot be written \("):
        save_bundle(*make(), Path("/proc/bundle"))


def test_a_path_that_is_no_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"nowhere: no bundle here"):
        load_bundle(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["blocks.0.attn.qkv.to_k", "head.bias", "pos_embed"])
def test_check_golden_catches_a_weight_that_moved(bundle: Path, name: str) -> None:
    model, _ = load_bundle(bundle)
    with torch.no_grad():
        model.get_parameter(name).add_(torch.randn(model.get_parameter(name).shape) * 0.3)
    with pytest.raises(BundleError, match="logits differ by"):
        check_golden(model, bundle)


def test_check_golden_catches_nan(bundle: Path) -> None:
    model, _ = load_bundle(bundle)
    nan(model)
    with pytest.raises(BundleError, match="logits differ by nan"):
        check_golden(model, bundle)


@pytest.mark.parametrize("name", [WEIGHTS, CARD])
def test_one_flipped_bit_is_damage_even_where_no_logit_moves(bundle: Path, name: str) -> None:
    data = bytearray((bundle / name).read_bytes())
    place = data.index(b"oak") if name == CARD else len(data) - 4  # the last float's lowest bit; a class's name
    data[place] ^= 1
    (bundle / name).write_bytes(data)
    with pytest.raises(BundleError, match=f"{name}: damaged"):
        load_bundle(bundle)
