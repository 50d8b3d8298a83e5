"""Bundles whose files were lost, damaged or swapped for others: each is named, and nothing of them is run."""

import json
import pickle
import re
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.zoo.trained import TINY
from zoo.bundle import CARD, GOLDEN, WEIGHTS, check_golden, load_bundle
from zoo.errors import BundleError
from zoo.files.bundle_files import digest


def read(file: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in load_file(file).items()}  # load_file maps the file itself


def rewrite(file: Path, change: Callable[[dict[str, torch.Tensor]], object] = len, **metadata: str) -> None:
    tensors = read(file)
    change(tensors)
    save_file(tensors, file, metadata=metadata)


def edit_card(bundle: Path, **fields: object) -> None:
    card = json.loads((bundle / CARD).read_text(encoding="utf-8")) | fields
    (bundle / CARD).write_text(json.dumps(card), encoding="utf-8")


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
    (lambda b: (b / CARD).unlink(), r"bundle: no card\.json in it: not a bundle$"),
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
    (lambda b: edit_card(b, format_version=3), "format_version 3 is newer"),
    (lambda b: edit_card(b, class_names=["a", "b", "c", "d"]), "the card's 4 class_names"),
    (lambda b: edit_card(b, attention="parametr"), "unknown attention 'parametr', did you mean 'parameter'"),
    (
        lambda b: edit_card(b, attention="mine", plugins=["my_pkg"]),
        r"attention 'mine' is not registered here: it needs .* my_pkg",
    ),
    (lambda b: edit_card(b, attention_options={"x": 1}), "attention_options"),
    (lambda b: edit_card(b, timm_kwargs=TINY | {"embed_dim": 10**6}), r"does not fit the card: .*wanted \(.*1000000"),
    (lambda b: edit_card(b, timm_kwargs=TINY | {"num_heads": 0}), "timm cannot build it with .*num_heads=0"),
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
    edit_card(bundle, timm_kwargs=TINY | {"mlp_ratio": 30_000})  # 250 MB a layer
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BundleError, match=r"blocks\.0\.mlp\.fc1\.bias: got \(128,\) float32, wanted \(960000,\)"):
        load_bundle(bundle)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


def test_a_path_that_is_no_directory_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", str(tmp_path / "nowhere")):
        with pytest.raises(BundleError, match=r"nowhere: no bundle here"):
            load_bundle(path)


def test_a_runs_folder_points_to_its_bundle(bundle: Path) -> None:
    hint = f"no card.json in it: not a bundle; did you mean {bundle}?"
    with pytest.raises(BundleError, match=re.escape(f"{bundle.parent}: {hint}")):
        load_bundle(bundle.parent)
    with pytest.raises(BundleError, match=re.escape(hint)):
        check_golden(load_bundle(bundle)[0], str(bundle.parent))


@pytest.mark.parametrize("name", [WEIGHTS, CARD])
def test_one_flipped_bit_is_damage_even_where_no_logit_moves(bundle: Path, name: str) -> None:
    data = bytearray((bundle / name).read_bytes())
    place = data.index(b"oak") if name == CARD else len(data) - 4  # the last float's lowest bit; a class's name
    data[place] ^= 1
    (bundle / name).write_bytes(data)
    with pytest.raises(BundleError, match=f"{name}: damaged"):
        load_bundle(bundle)
