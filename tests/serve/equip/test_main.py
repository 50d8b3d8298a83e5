"""`python -m serve.equip` as its user calls it, and in this process where that says as much."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from serve.equip.__main__ import main
from serve.equip.write import equip
from zoo import bundle as zoo_bundle
from zoo.bundle import load_bundle, save_bundle
from zoo.card import EngineChoice
from zoo.errors import ExportError

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[3]


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.slow
def test_a_bundle_gets_onnx_runtime_as_its_engine_and_the_old_one_stays(bundle: Path, tmp_path: Path) -> None:
    before = contents(bundle)
    command = [sys.executable, "-m", "serve.equip", str(bundle), str(tmp_path / "new"), "--engine", "onnx"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{tmp_path / 'new'}: engine onnx fp32, logits within ")
    assert contents(bundle) == before
    new = contents(tmp_path / "new")
    assert new["model.safetensors"] == before["model.safetensors"]
    assert new.keys() - before.keys() == {"model.onnx"}


def test_the_card_differs_in_its_engine_alone_and_loses_another_engines_score(bundle: Path, tmp_path: Path) -> None:
    model, card = load_bundle(bundle)
    scored = card.model_copy(update={"metrics": {"val/top1": 0.5, "serve/top1": 0.4}})
    save_bundle(model, scored, tmp_path / "old")
    choice = EngineChoice(name="eager", precision="bf16")
    assert 0 < equip(tmp_path / "old", tmp_path / "new", choice) < 0.5
    _, found = load_bundle(tmp_path / "new")
    assert found == card.model_copy(update={"metrics": {"val/top1": 0.5}, "engine": choice})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere", "NEW", "--engine", "onnx"], "nowhere: no bundle here"),
        (["BUNDLE", "BUNDLE", "--engine", "onnx"], "exists already; nothing is overwritten"),
        (["BUNDLE", "NEW", "--engine", "onnx", "--precision", "bf16"], "the engine onnx computes in fp32"),
        (["BUNDLE", "NEW", "--engine", "eager", "--plugins", "nowhere.py"], "plugin nowhere.py: no such file"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    bundle: Path, tmp_path: Path, capsys: Capture, arguments: list[str], said: str
) -> None:
    places = {"BUNDLE": str(bundle), "NEW": str(tmp_path / "new")}
    assert main([places.get(word, word) for word in arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert said in printed.err
    assert printed.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments", [[], ["a"], ["a", "b"], ["a", "b", "--engine", "tensorrt"], ["a", "b", "--eng", "onnx"]]
)
def test_a_line_that_is_not_understood_is_one_line(capsys: Capture, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert printed.err.endswith("see python -m serve.equip --help\n")
    assert printed.err.count("\n") == 1


def test_help_explains_itself(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    for word in ("BUNDLE", "NEW", "--engine {eager,compile,onnx}", "--precision {fp32,bf16}", "Exit status: 0 done"):
        assert word in printed


def test_an_engine_that_cannot_compute_it_is_a_fault_and_writes_nothing(
    bundle: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: object) -> None:
        raise ExportError("torch.onnx cannot export this model: planned")

    monkeypatch.setattr(zoo_bundle, "export_onnx", refuse)
    assert main([str(bundle), str(tmp_path / "new"), "--engine", "onnx"]) == 3
    assert capsys.readouterr().err == "error: torch.onnx cannot export this model: planned\n"
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_bundle_is_not_equipped(bundle: Path, tmp_path: Path, capsys: Capture) -> None:
    broken = Path(shutil.copytree(bundle, tmp_path / "broken"))
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\1\2\3\4")
    assert main([str(broken), str(tmp_path / "new"), "--engine", "eager"]) == 2
    assert "model.safetensors: damaged" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
