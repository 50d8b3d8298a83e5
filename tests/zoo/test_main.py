import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import zoo
from zoo.__main__ import main
from zoo.create import create_model
from zoo.init import INIT_SCHEMES

ROOT = Path(__file__).parent.parent.parent
BACKBONE = "test_vit"  # timm's own tiny model: 6 blocks of dim 64


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zoo", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_describe_shows_shapes_and_spread(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", BACKBONE, "--attention", "parameter", "--init", "torch"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("test_vit: 6 attention modules, parameter, drawn by torch\nblocks.0.attn: 2 heads, dim 64,")
    assert "  qkv.to_k                 64 x 64\n" in out
    assert ", expected 0.07217\n" in out  # 1/sqrt(3 * 64)


@pytest.mark.parametrize(("init", "expected"), [("normal", 1.0), ("trunc_normal", 0.02), (None, None)])
def test_describe_gives_json(capsys: pytest.CaptureFixture[str], init: str | None, expected: float | None) -> None:
    extra = [] if init is None else ["--init", init]
    assert main(["describe", BACKBONE, "--attention", "separate", "--json", "--seed", "3", *extra]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["backbone"], told["attention"], told["init"], told["seed"]) == (BACKBONE, "separate", init, 3)
    first = told["attentions"][0]
    assert (len(told["attentions"]), first["name"]) == (6, "blocks.0.attn")
    assert first["parameters"]["qkv.to_q.weight"] == [64, 64]
    assert first["expected_std"] == dict.fromkeys(("q", "k", "v", "out"), expected)
    if expected is not None:
        assert first["std"]["q"] == pytest.approx(expected, rel=0.1)
    assert first["logit_std"] > 0


def test_audit_of_a_sound_model_is_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", BACKBONE, "--attention", "parameter"]) == 0
    assert capsys.readouterr().out.startswith("audit: ")
    assert main(["audit", BACKBONE, "--attention", "parameter", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trainable"] > 0


def test_audit_that_finds_an_error_is_3(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(*args: Any, **kwargs: Any) -> nn.Module:
        model = create_model(*args, **kwargs)
        model.get_parameter("blocks.1.attn.qkv.to_k").data.fill_(float("nan"))
        return model

    monkeypatch.setattr(zoo, "create_model", planted, raising=False)
    assert main(["audit", BACKBONE, "--attention", "parameter"]) == 3
    assert "blocks.1.attn.qkv.to_k" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["describe", "test_vitt", "--attention", "linear"],
            "python -m zoo describe: unknown backbone 'test_vitt', did",
        ),
        (
            ["audit", BACKBONE, "--attention", "liner"],
            "python -m zoo audit: unknown attention 'liner', did you mean 'li",
        ),
        (
            ["describe", BACKBONE, "--attention", "linear", "--init", "x"],
            "python -m zoo describe: unknown init 'x'; kn",
        ),
        (["describe", "resnet10t", "--attention", "linear"], "python -m zoo describe: ResNet has no attention that"),
    ],
)
def test_a_mistake_is_one_line_and_2(capsys: pytest.CaptureFixture[str], arguments: list[str], line: str) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(line)
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "python -m zoo: the following arguments are required: COMMAND; see python -m zoo --help"),
        (["describe", BACKBONE], "python -m zoo describe: the following arguments are required: --attention; see"),
        (["paint"], "python -m zoo: argument COMMAND: invalid choice: 'paint'"),
        (["audit", BACKBONE, "--attention", "linear", "--seed", "x"], "argument --seed: invalid int value: 'x'; see"),
        (["audit", BACKBONE, "--attention", "linear", "--sed", "1"], "unrecognized arguments: --sed 1"),
    ],
)
def test_bad_usage_is_one_line_and_2(capsys: pytest.CaptureFixture[str], arguments: list[str], line: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert line in err
    assert err.count("\n") == 1


def test_help_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["--help"], ("describe", "audit", "Exit status: 0 done, 2")),
        (["describe", "--help"], ("BACKBONE", "--attention", "--seed", "--json", "Exit status", *INIT_SCHEMES)),
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
        out = capsys.readouterr().out
        assert all(word in out for word in words)


@pytest.mark.slow
def test_it_runs_as_a_module() -> None:
    done = run("describe", BACKBONE, "--attention", "parameter", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(json.loads(done.stdout)["attentions"]) == 6
    wrong = run("describe", "vit_tiny_patch16_22", "--attention", "parameter")
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (2, "", 1)
    assert "did you mean 'vit_tiny_patch16_224'" in wrong.stderr
