"""The command line, end to end: what is printed, where, and with which status."""

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

import zoo
from tests.zoo.command_line import BACKBONE, Capture, asked, refused
from tests.zoo.trained import TINY, bundle_of
from zoo import registry
from zoo.__main__ import main
from zoo.commands import listing

TINY_ARGUMENTS = ["--model-kwargs", *(f"{key}={value}" for key, value in TINY.items())]

PLUGIN = """
import torch, zoo
from torch import nn

@zoo.register_attention("cool")
class Cool(zoo.Attention):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.lost = {lost}

    def attend(self, q, k, v, **masks):
        return super().attend(q * self.lost, k, v, **masks)
"""


@pytest.fixture
def plugin(tmp_path: Path, own_registry: None) -> Path:  # noqa: ARG001
    """Write a file that registers "cool", and forget it afterwards."""
    file = tmp_path / "cool_attention.py"
    file.write_text(PLUGIN.format(lost="nn.Parameter(torch.ones(()))"), encoding="utf-8")
    return file


def test_list_shows_what_swaps_and_why_the_others_do_not(capsys: Capture) -> None:
    lines = asked(capsys, ["list", "vit_tiny_patch16_224", "coatnet_pico_rw_224"]).splitlines()
    assert [line.split()[:4] for line in lines[1:3]] == [
        ["coatnet_pico_rw_224", "10.9M", "224", "no"],
        ["vit_tiny_patch16_224", "5.7M", "224", "yes"],
    ]
    assert "maxxvit.Attention2d: its projections are 1x1 convolutions, not nn.Linear" in lines[1]
    assert lines[3].startswith("2 models: 1 swappable, 1 not; timm ")


def test_list_shows_every_attention_model_in_json(capsys: Capture) -> None:
    told = json.loads(asked(capsys, ["list", "--json"]))
    assert len(told["models"]) >= 690
    assert told["swappable"] >= 570
    assert all(model["swappable"] == (model["reason"] is None) for model in told["models"])


@pytest.mark.parametrize(
    ("arguments", "check"),
    [
        (["--swappable"], lambda model: model["swappable"]),
        (["--refused"], lambda model: not model["swappable"]),
        (["--family", "eva"], lambda model: model["family"] == "eva"),
        (["--class", "EvaAttention"], lambda model: "timm.models.eva.EvaAttention" in model["attention"]),
        (["--attention", "separate"], lambda model: model["swappable"]),
        (["eva02_*", "--class", "eva.*"], lambda model: model["name"].startswith("eva02_")),
    ],
)
def test_list_filters(capsys: Capture, arguments: list[str], check: Any) -> None:
    everything = json.loads(asked(capsys, ["list", "--json"]))["models"]
    chosen = json.loads(asked(capsys, ["list", "--json", *arguments]))["models"]
    assert chosen == [model for model in everything if check(model)]
    assert 0 < len(chosen) < len(everything)


def test_list_of_a_users_own_whole_module(capsys: Capture, plugin: Path) -> None:
    arguments = ["list", "vit_tiny_*", "--attention", "cool", "--plugins", str(plugin)]
    assert "dinov3" not in asked(capsys, arguments)
    out = asked(capsys, [*arguments, "--refused"])
    assert "vit_tiny_patch16_dinov3_qkvb" in out
    assert "eva.EvaAttention: cool is a whole module, which stands in for attention.Attention alone" in out


def test_filters_that_leave_nothing_are_an_answer(capsys: Capture) -> None:
    assert asked(capsys, ["list", "vit_tiny*", "--refused"]).startswith("0 models: 0 swappable, 0 not")


def test_list_fits_a_terminal(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "90")
    assert max(map(len, asked(capsys, ["list"]).splitlines())) <= 90


def test_another_timm_is_one_line_beside_the_list(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "version", lambda _: "9.9.9")
    assert main(["list", "vit_tiny*", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["timm"] == "9.9.9"
    assert err.startswith("python -m zoo list: timm 9.9.9 is installed, and this list is of timm ")
    assert err.count("\n") == 1


def test_describe_shows_what_is_stored_and_its_spread(capsys: Capture) -> None:
    lines = asked(capsys, ["describe", BACKBONE, "--attention", "parameter", "--init", "torch"]).splitlines()
    assert lines[:2] == ["test_vit: parameter, drawn by torch, seed 0", ""]
    assert lines[3].split()[:4] == ["by", "the", "scheme", "0.0722"]
    assert lines[4].split()[:3] == ["blocks.0.attn", "64", "2"]
    assert "blocks.0-5.attn: attention.Attention stores" in lines
    assert [line for line in lines if line.startswith("!")] == []


@pytest.mark.parametrize(("init", "expected"), [("normal", 1.0), ("trunc_normal", 0.02), (None, None)])
def test_describe_gives_json(capsys: Capture, init: str | None, expected: float | None) -> None:
    extra = [] if init is None else ["--init", init]
    out = asked(capsys, ["describe", BACKBONE, "--attention", "separate", "--json", "--seed", "3", *extra])
    told = json.loads(out)
    assert (told["backbone"], told["attention"], told["init"], told["seed"]) == (BACKBONE, "separate", init, 3)
    first = told["attentions"][0]
    assert (len(told["attentions"]), first["name"]) == (6, "blocks.0.attn")
    to_q = first["parameters"]["qkv.to_q.weight"]
    assert (to_q["shape"], to_q["trainable"], to_q["contiguous"], to_q["tied_to"]) == ([64, 64], True, True, [])
    assert to_q["parts"]["q"]["expected_std"] == expected
    assert to_q["parts"]["q"]["std"] == pytest.approx(expected or 0.02, rel=0.1)
    assert first["logit_std"] > 0
    assert {note["what"] for note in told["notes"]} == (
        {"attends to one token: logit std"} if init == "normal" else set()
    )


def test_describe_takes_timms_arguments_and_a_plugin(capsys: Capture, plugin: Path) -> None:
    arguments = ["--attention", "cool", "--plugins", str(plugin), *TINY_ARGUMENTS, "num_classes=3"]
    out = asked(capsys, ["describe", "vit_tiny_patch16_224", *arguments])
    assert out.startswith("vit_tiny_patch16_224, img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_c")
    assert re.search(r"^blocks\.0-1\.attn: \S+\.Cool stores$", out, re.MULTILINE)
    assert "  lost " in out


def test_describe_and_audit_of_a_bundle(capsys: Capture, bundle: Path) -> None:
    out = asked(capsys, ["describe", str(bundle)])
    assert out.startswith(f"bundle {bundle}: vit_tiny_patch16_224")
    assert "3 classes, images of 32 x 32 pixels\n" in out
    told = json.loads(asked(capsys, ["describe", str(bundle), "--json"]))
    assert (told["bundle"]["class_names"], told["attention"]) == (["ash", "日本 語", "oak"], "parameter")
    out = asked(capsys, ["audit", str(bundle), "--batch"])
    assert "\naudit: 40 parameters, 40 trainable, 0 findings\n" in out


def test_audit_of_a_sound_model_is_0(capsys: Capture) -> None:
    out = asked(capsys, ["audit", BACKBONE, "--attention", "parameter", "--batch"])
    assert out.splitlines()[1] == "audit: 104 parameters, 104 trainable, 0 findings"
    told = json.loads(asked(capsys, ["audit", BACKBONE, "--attention", "parameter", "--json"]))
    assert (told["backbone"], told["trainable"], told["findings"]) == (BACKBONE, 104, [])


def test_a_warning_of_the_audit_is_0(capsys: Capture) -> None:
    out = asked(capsys, ["audit", BACKBONE, "--attention", "parameter", "--init", "normal"])
    assert "warning: scale: blocks.0.attn: " in out


def test_audit_that_finds_an_error_is_3(capsys: Capture, tmp_path: Path, own_registry: None) -> None:  # noqa: ARG001
    file = tmp_path / "lost_attention.py"
    file.write_text(PLUGIN.format(lost="torch.ones(()).requires_grad_()"), encoding="utf-8")
    arguments = ["audit", BACKBONE, "--attention", "cool", "--plugins", str(file)]
    out = asked(capsys, arguments, status=3)
    assert "error: registered: blocks.0.attn.lost: " in out
    told = json.loads(asked(capsys, [*arguments, "--json"], status=3))
    assert told["findings"][0]["tensor"] == "blocks.0.attn.lost"


def test_a_fault_of_forward_is_found_with_a_batch_alone(capsys: Capture, tmp_path: Path, own_registry: None) -> None:  # noqa: ARG001
    file = tmp_path / "idle_attention.py"
    file.write_text(PLUGIN.format(lost="1.0\n        self.idle = nn.Parameter(torch.ones(2))"), encoding="utf-8")
    arguments = ["audit", BACKBONE, "--attention", "cool", "--plugins", str(file)]
    assert "0 findings" in asked(capsys, arguments)
    assert "error: probe: blocks.0.attn.idle: " in asked(capsys, [*arguments, "--batch", "3"], status=3)


def test_convert_tells_what_it_did(capsys: Capture, bundle: Path, tmp_path: Path) -> None:
    out = asked(capsys, ["convert", str(bundle), str(tmp_path / "stock"), "--attention", "timm"])
    assert out.startswith(f"{bundle} (parameter) -> {tmp_path / 'stock'} (timm)\nvit_tiny_patch16_224, ")
    assert "which timm passes over" in out
    model = timm.create_model(f"local-dir:{tmp_path / 'stock'}", pretrained=True).eval()
    back = ["convert", str(tmp_path / "stock"), str(tmp_path / "back"), "--attention", "separate", "--json"]
    told = json.loads(asked(capsys, back))
    assert (told["before"], told["after"], told["num_classes"]) == ("timm", "separate", 3)
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    loaded, card = zoo.load_bundle(tmp_path / "back")
    torch.testing.assert_close(loaded(images), model(images), rtol=1e-5, atol=1e-6)  # other products, same sums
    assert card.class_names == ("ash", "日本 語", "oak")


def test_convert_names_the_classes_of_a_model_of_timms(capsys: Capture, bundle: Path, tmp_path: Path) -> None:
    stock = tmp_path / "stock"
    asked(capsys, ["convert", str(bundle), str(stock), "--attention", "timm"])
    arguments = ["convert", f"local-dir:{stock}", str(tmp_path / "named"), "--attention", "linear", "--class-names"]
    assert "class_names: got 2, the model has 3 classes" in refused(capsys, [*arguments, "yes", "no"])
    asked(capsys, [*arguments, "red", "green", "blue"])
    assert zoo.load_bundle(tmp_path / "named")[1].class_names == ("red", "green", "blue")


def test_a_bundle_of_a_users_own_attention_wants_its_plugin(
    capsys: Capture, tmp_path: Path, plugin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [str(tmp_path / "cool"), "--plugins", str(plugin)]
    with monkeypatch.context() as context:
        context.setattr(registry, "_ATTENTIONS", dict(registry._ATTENTIONS))
        zoo.load_plugins(plugin)
        bundle_of(tmp_path / "cool", "cool", plugins=zoo.plugin_sources("cool"))
    assert "cool_attention.py" in refused(capsys, ["describe", arguments[0]])
    assert "  lost " in asked(capsys, ["describe", *arguments])
    assert "0 findings" in asked(capsys, ["audit", *arguments, "--batch"])


def test_nothing_is_overwritten(capsys: Capture, bundle: Path) -> None:
    assert "exists already" in refused(capsys, ["convert", str(bundle), str(bundle), "--attention", "timm"])


def test_a_terminal_that_cannot_show_a_name_is_no_reason_to_fail(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle.rename(tmp_path / "日本")
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["describe", str(tmp_path / "日本")]) == 0
    assert b"/\\u65e5\\u672c: vit_tiny" in terminal.buffer.getvalue()
