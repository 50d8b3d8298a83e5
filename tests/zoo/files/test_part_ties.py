"""Ties of q, k or v alone, on the way to stock timm, which keeps them in one weight, and back."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import zoo
from tests.zoo.trained import adapted, card_of, load, make
from zoo.bundle import load_bundle, save_bundle
from zoo.conversion import convert
from zoo.errors import BackboneError, SwapError
from zoo.files.part_ties import untie_parts
from zoo.files.ties import find_ties

Q = "blocks.{}.attn.qkv.to_q"
TO_Q = {Q.format(1): Q.format(0)}


def tied(*groups: str, attention: str = "parameter", **kwargs: Any) -> nn.Module:
    model = make(attention, **kwargs)
    zoo.tie(model, *groups)
    return model


def bundle_with(path: Path, model: nn.Module, attention: str = "parameter") -> Path:
    save_bundle(model, card_of(attention), path)
    return path


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def first(tmp_path: Path) -> Path:
    return bundle_with(tmp_path / "first", tied("blocks.*.attn.qkv.to_q"))


def test_a_tie_of_q_alone_goes_to_timm_and_comes_back(tmp_path: Path, first: Path, images: Tensor) -> None:
    report = convert(first, tmp_path / "timm", "timm")
    assert report.difference < 1e-6
    note = f"untied: {Q.format(1)} = {Q.format(0)}: timm keeps each as a part of a fused weight"
    assert [said for said in report.notes if said.startswith(note)]
    again = convert(tmp_path / "timm", tmp_path / "second", "parameter")
    assert files(tmp_path / "second") == files(first)
    assert not [said for said in again.notes if "tied" in said]
    model = load_bundle(tmp_path / "second")[0]
    assert find_ties(model.state_dict()) == TO_Q
    torch.testing.assert_close(load(tmp_path / "timm")(images), model(images))


def test_to_a_bundle_of_timms_own_form_it_is_refused(tmp_path: Path, first: Path) -> None:
    with pytest.raises(SwapError, match=r"blocks\.0\.attn\.qkv\.to_q is tied to blocks\.1\.attn\.qkv\.to_q"):
        convert(first, tmp_path / "new", "linear")
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def test_what_a_form_cannot_tie_is_said_and_the_next_folder_keeps_it(tmp_path: Path, first: Path) -> None:
    convert(first, tmp_path / "timm", "timm")
    report = convert(tmp_path / "timm", tmp_path / "linear", "linear")
    lost = f"{Q.format(1)} and {Q.format(0)}: tied in the file, two tensors now"
    assert report.notes == (lost,)
    assert adapted(load(tmp_path / "timm")) == (lost,)
    convert(tmp_path / "timm", tmp_path / "again", "timm")
    assert files(tmp_path / "again") == files(tmp_path / "timm")


def test_a_training_from_the_folder_has_the_tie(tmp_path: Path, first: Path) -> None:
    convert(first, tmp_path / "timm", "timm")
    model = load(tmp_path / "timm", "parameter")
    assert find_ties(model.state_dict()) == TO_Q
    assert adapted(model) == ()


def test_weights_that_were_changed_apart_are_not_tied(tmp_path: Path, first: Path) -> None:
    convert(first, tmp_path / "timm", "timm")
    weights = load_file(tmp_path / "timm" / "model.safetensors")
    weights["blocks.1.attn.qkv.weight"][0, 0] += 1
    save_file(weights, tmp_path / "timm" / "model.safetensors")
    report = convert(tmp_path / "timm", tmp_path / "second", "parameter")
    assert report.notes[-1] == f"{Q.format(1)} and {Q.format(0)}: tied in the file, two tensors now"
    assert not find_ties(load_bundle(tmp_path / "second")[0].state_dict())


@pytest.mark.parametrize(
    ("ties", "message"),
    [
        ([], r"config\.json: part_ties: got a list, wanted an object of names"),
        ({Q.format(1): 3}, r"part_ties: blocks\.1\.attn\.qkv\.to_q is tied to 3, wanted the name of an untied tensor"),
        ({"a": "b", "b": "c"}, "part_ties: a is tied to 'b', wanted the name of an untied tensor"),
    ],
)
@pytest.mark.parametrize("read", [load, lambda path: convert(path, path.parent / "new", "parameter")])
def test_a_damaged_list_is_named(
    tmp_path: Path, first: Path, ties: object, message: str, read: Callable[[Path], object]
) -> None:
    convert(first, tmp_path / "timm", "timm")
    config = json.loads((tmp_path / "timm" / "config.json").read_text(encoding="utf-8"))
    config["attention_zoo"]["part_ties"] = ties
    (tmp_path / "timm" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(BackboneError, match=message):
        read(tmp_path / "timm")


WHOLE = tuple(f"blocks.*.attn.qkv.to_{part}" for part in "qkv")
BIASES = tuple(f"blocks.*.attn.qkv.to_{part}_bias" for part in "qkv")


@pytest.mark.parametrize(
    ("groups", "untied"),
    [
        (WHOLE, 0),  # the fused weights can be one
        ((*WHOLE, *BIASES), 0),
        (("blocks.*.mlp.fc1.weight",), 0),
        (WHOLE[:2], 2),
        (BIASES[:1], 1),
        (("blocks.0.attn.qkv.to_q = blocks.0.attn.qkv.to_k",), 1),
        (("blocks.0.attn.qkv.to_q = blocks.1.attn.proj.projection",), 1),
        (("blocks.*.attn.proj.projection",), 0),
        ((*WHOLE, "blocks.0.attn.qkv.to_q = blocks.0.attn.proj.projection"), 4),  # the rest falls with q
    ],
)
def test_only_what_a_restore_refuses_is_untied(groups: tuple[str, ...], untied: int, images: Tensor) -> None:
    model = tied(*groups)
    with torch.no_grad():
        wanted = model(images)
    before = find_ties(model.state_dict())
    if untied:
        with pytest.raises(SwapError, match="is tied to"):
            zoo.restore_attention(model)
    lost = untie_parts(model)
    assert len(lost) == untied
    assert before == lost | find_ties(model.state_dict())
    assert torch.equal(model(images), wanted)
    zoo.restore_attention(model)
    torch.testing.assert_close(model(images), wanted)


def test_a_separate_q_tied_to_a_layer_outside_is_untied() -> None:
    model = tied("blocks.0.attn.qkv.to_q.weight = blocks.0.attn.proj.weight", attention="separate")
    assert untie_parts(model) == {"blocks.0.attn.proj.weight": "blocks.0.attn.qkv.to_q.weight"}
    zoo.restore_attention(model)


def test_a_frozen_tensor_stays_frozen() -> None:
    model = make("parameter")
    zoo.freeze(model, "blocks.*.attn.*")
    zoo.tie(model, "blocks.*.attn.qkv.to_q")
    untie_parts(model)
    assert not any(model.get_parameter(Q.format(block)).requires_grad for block in (0, 1))
