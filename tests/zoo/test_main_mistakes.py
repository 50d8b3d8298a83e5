"""The command line as a process: mistakes, streams that fail, and what it imports."""

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import zoo
from tests.zoo.command_line import BACKBONE, Capture, refused
from zoo.__main__ import main

ROOT = Path(__file__).parent.parent.parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zoo", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["list", "vit_tinny_patch16_224"],
            "unknown model 'vit_tinny_patch16_224', did you mean 'vit_tiny_patch16_224'",
        ),
        (["list", "resnet18"], "resnet18 is a timm model without attention"),
        (
            ["list", "--family", "swim_transformer"],
            "unknown family 'swim_transformer', did you mean 'swin_transformer'",
        ),
        (["list", "--attention", "liner"], "unknown attention 'liner', did you mean 'linear'"),
        (["describe", "test_vitt", "--attention", "linear"], "unknown backbone 'test_vitt', did you mean 'test_vit"),
        (["audit", BACKBONE, "--attention", "liner"], "unknown attention 'liner', did you mean 'linear'"),
        (["describe", BACKBONE, "--attention", ""], "unknown attention ''"),
        (["describe", BACKBONE], "test_vit: --attention is missing"),
        (["describe", BACKBONE, "--attention", "linear", "--init", "x"], "unknown init 'x'; known are"),
        (["describe", "resnet10t", "--attention", "linear"], "ResNet has no attention that can be swapped"),
        (
            ["audit", "coatnet_pico_rw_224", "--attention", "linear"],
            "cannot swap Attention2d, its projections are 1x1 conv",
        ),
        (
            ["describe", BACKBONE, "--attention", "linear", "--model-kwargs", "depth=two"],
            "test_vit: timm cannot build it",
        ),
        (["describe", BACKBONE, "--attention", "linear", "--model-kwargs", "dept=2"], "test_vit: timm cannot build it"),
        (
            ["describe", BACKBONE, "--attention", "linear", "--model-kwargs", "depth=2", "depth=3"],
            "depth is given twice",
        ),
        (["describe", str(ROOT / "README.md"), "--attention", "linear"], "README.md: a file; wanted a timm name"),
        (["describe", str(ROOT / "zoo"), "--attention", "linear"], "zoo: a directory without card.json"),
        (["describe", "日本 語", "--attention", "linear"], "unknown backbone '日本 語'"),
        (["describe", "a\nb", "--attention", "linear"], "unknown backbone 'a\\nb'"),
        (["describe", BACKBONE, "--attention", "linear", "--json", "--init", "x"], "unknown init 'x'"),
        (["describe", BACKBONE, "--attention", "linear", "--plugins", "none.py"], "plugin none.py: no such file"),
        (["convert", "./none", "x", "--attention", "timm"], "./none: nothing is there"),
        (["convert", "none", "x", "--attention", "timmm"], "unknown attention 'timmm', did you mean 'timm'"),
    ],
)
def test_a_mistake_is_one_line_and_2(capsys: Capture, arguments: list[str], said: str) -> None:
    assert said in refused(capsys, arguments)


def test_a_warning_is_one_line(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    create = zoo.create.create_model

    def warn(*args: Any, **kwargs: Any) -> nn.Module:
        warnings.warn("of two\n lines", UserWarning, stacklevel=2)
        return create(*args, **kwargs)

    monkeypatch.setattr("zoo.commands.subjects.create_model", warn)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = lambda *about, **_: sys.stderr.write(warnings.formatwarning(*about[:4]))
        assert main(["describe", BACKBONE, "--attention", "linear"]) == 0
    assert capsys.readouterr().err == "python -m zoo describe: warning: of two lines\n"
    assert warnings.formatwarning("x", UserWarning, "f", 1).startswith("f:1: ")  # as it was


def test_an_interrupt_is_no_traceback(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> nn.Module:
        raise KeyboardInterrupt

    monkeypatch.setattr("zoo.commands.subjects.create_model", interrupt)
    assert main(["describe", BACKBONE, "--attention", "linear"]) == 130
    assert capsys.readouterr() == ("", "")


def test_list_imports_neither_torch_nor_timm() -> None:
    code = (
        "import sys; from zoo.__main__ import main; main(['list', 'vit_*']); "
        "sys.exit(bool({'torch', 'timm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_has_read_enough_is_no_traceback() -> None:
    command = f"set -o pipefail; {sys.executable} -m zoo list --json | head -n 1"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "{\n", "")


def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123
        command = [sys.executable, "-m", "zoo", "list", "--json"]
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "python -m zoo: [Errno 28] No space left on device\n")


@pytest.mark.slow
def test_it_runs_as_a_module_and_as_a_script() -> None:
    done = run("describe", BACKBONE, "--attention", "parameter", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(json.loads(done.stdout)["attentions"]) == 6
    wrong = run("describe", "vit_tiny_patch16_22", "--attention", "parameter")
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (2, "", 1)
    assert "did you mean 'vit_tiny_patch16_224'" in wrong.stderr
    script = Path(sys.executable).parent / "attention-zoo"
    listed = subprocess.run([script, "list", "vit_tiny*"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (listed.returncode, listed.stdout, listed.stderr) == (0, run("list", "vit_tiny*").stdout, "")
