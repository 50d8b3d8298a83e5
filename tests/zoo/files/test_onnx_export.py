"""Models as ONNX files: the same function at any batch size, said quietly, with nothing of where it was made."""

import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.zoo.trained import card_of, make
from zoo import bundle as zoo_bundle
from zoo.bundle import CARD, GOLDEN, ONNX, WEIGHTS, load_bundle, save_bundle
from zoo.card import EngineChoice
from zoo.conversion import convert
from zoo.errors import ExportError
from zoo.files import onnx_export
from zoo.files.onnx_export import check_exportable, export_onnx


@pytest.mark.slow
@pytest.mark.parametrize("attention", zoo.list_attentions())
def test_every_variant_is_the_same_function_at_any_batch_size(
    attention: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    model = make(attention)
    with caplog.at_level(logging.INFO):
        export_onnx(model, (32, 32), tmp_path / "model.onnx")
    printed = capfd.readouterr()
    assert (printed.out, printed.err, caplog.messages) == ("", "", [])
    file = onnx.load(tmp_path / "model.onnx")
    onnx.checker.check_model(file, full_check=True)
    assert [entry.domain for entry in file.opset_import] == [""]
    assert not [word for word in (b"site-packages", b".py", b"/home", b"/work") if word in file.SerializeToString()]
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for count in (1, 2, 5):
        images = torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(count))
        with torch.inference_mode():
            wanted = model(images).numpy()
        (got,) = session.run(["logits"], {"image": images.numpy()})
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)


class Choosy(nn.Module):
    """Computes otherwise for other numbers, which the exporter cannot follow."""

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1)[:, :3] * (2 if images.sum() > 0 else 1)


@pytest.mark.slow
def test_a_model_that_cannot_be_exported_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ExportError, match=r"^torch\.onnx cannot export this model: \w+: .+") as caught:
        export_onnx(Choosy(), (4, 4), tmp_path / "model.onnx")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_exporting_without_its_packages_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def miss(*_args: object, **_options: object) -> None:
        raise ModuleNotFoundError("No module named 'onnxscript'")

    monkeypatch.setattr(torch.onnx, "export", miss)
    with pytest.raises(ExportError, match=r"takes the packages onnx and onnxscript: .*'onnxscript'"):
        export_onnx(make(), (32, 32), tmp_path / "model.onnx")


def test_warnings_of_the_exporter_are_logged_and_levels_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Program:
        model: Any = onnx  # whatever

        def save(self, file: Path, *, external_data: bool) -> None:
            assert not external_data
            file.write_bytes(b"")

    def export(*_args: object, **_options: object) -> Program:
        warnings.warn("a node was\nrounded", stacklevel=1)
        logging.getLogger("onnxscript.optimizer").info("step")
        return Program()

    monkeypatch.setattr(torch.onnx, "export", export)
    monkeypatch.setattr(onnx_export, "_forget_origins", lambda _model: None)
    monkeypatch.setattr(onnx_export, "check_onnx", lambda _file: b"")
    with caplog.at_level(logging.DEBUG):
        before = logging.getLogger("onnxscript").level
        export_onnx(make(), (32, 32), tmp_path / "model.onnx")
        assert logging.getLogger("onnxscript").level == before
    said = [record.message for record in caplog.records if record.name == "zoo.files.onnx_export"]
    assert said == ["torch.onnx: UserWarning: a node was"]
    assert "step" not in caplog.messages


def test_a_model_beyond_one_file_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        huge = nn.Linear(30_000, 20_000)
    with pytest.raises(
        ExportError, match=r"its weights take 2\.4 GB, and one ONNX file holds 2 GB .* eager or compile"
    ):
        check_exportable(huge)
    monkeypatch.setattr(onnx_export, "MAX_WEIGHT_BYTES", 1000)
    with pytest.raises(ExportError, match="one ONNX file holds"):
        save_bundle(make(), card_of("linear", engine={"name": "onnx"}), tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


def test_a_bundle_of_onnx_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object) -> None:
        raise ExportError("planned")

    monkeypatch.setattr(zoo_bundle, "export_onnx", fail)
    with pytest.raises(ExportError, match="planned"):
        save_bundle(make(), card_of("linear", engine={"name": "onnx"}), tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_exported_is_part_of_the_bundle_and_no_conversion_carries_it_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zoo_bundle, "export_onnx", lambda _model, _size, file: file.write_bytes(b"as if"))
    save_bundle(make(), card_of("linear", engine={"name": "onnx"}), tmp_path / "bundle")
    assert sorted(file.name for file in (tmp_path / "bundle").iterdir()) == [CARD, GOLDEN, ONNX, WEIGHTS]
    report = convert(tmp_path / "bundle", tmp_path / "other", "parameter")
    assert not (tmp_path / "other" / ONNX).exists()
    assert load_bundle(tmp_path / "other")[1].engine == EngineChoice()
    assert any("python -m serve.equip" in note for note in report.notes)


def test_proof_refuses_or_adds_metrics_before_the_bundle_has_its_name(tmp_path: Path) -> None:
    def prove(folder: Path, model: nn.Module) -> dict[str, float]:
        assert folder != tmp_path / "bundle"
        assert not (tmp_path / "bundle").exists()
        assert not model.training
        return {"serve/top1": 0.25}

    def refuse(folder: Path, _model: nn.Module) -> dict[str, float]:
        raise ExportError(f"{folder}: computes something else")

    with pytest.raises(ExportError, match=rf"^{tmp_path / 'bundle'}: computes something else"):
        save_bundle(make(), card_of("linear"), tmp_path / "bundle", prove=refuse)
    assert list(tmp_path.iterdir()) == []
    save_bundle(make(), card_of("linear", metrics={"val/top1": 0.5}), tmp_path / "bundle", prove=prove)
    assert load_bundle(tmp_path / "bundle")[1].metrics == {"val/top1": 0.5, "serve/top1": 0.25}
