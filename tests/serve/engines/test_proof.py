"""The comparison before a bundle gets its name: what differs from torch is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from serve.engines import proof
from serve.engines.eager import EagerEngine
from serve.engines.proof import BATCH_SIZES, prove_engine, proving
from serve.errors import EngineError
from zoo import bundle as zoo_bundle
from zoo.bundle import ONNX, load_bundle, save_bundle
from zoo.card import EngineChoice
from zoo.errors import UnfitEngineError
from zoo.files.golden import read_bundle_card

EAGER, ONNX_ENGINE = EngineChoice(), EngineChoice(name="onnx")


class Altered(EagerEngine):
    """An engine that answers what `alter` makes of the right logits."""

    alter: Callable[[np.ndarray], np.ndarray]

    def run(self, images: np.ndarray) -> np.ndarray:
        return type(self).alter(super().run(images))


def open_altered(monkeypatch: pytest.MonkeyPatch, alter: Callable[[np.ndarray], np.ndarray]) -> None:
    def open_engine(path: Path, card: Any, **_options: object) -> tuple[Altered, float]:
        Altered.alter = staticmethod(alter)
        return Altered(load_bundle(path)[0], card, card.engine, proof.EngineOptions(device="cpu")), 0.0

    monkeypatch.setattr(proof, "open_engine", open_engine)


def test_several_batch_sizes_are_compared_and_the_largest_difference_is_told(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def alter(logits: np.ndarray) -> np.ndarray:
        sizes.append(len(logits))
        return logits + np.float32(1e-4 * len(logits))

    open_altered(monkeypatch, alter)
    _, difference = prove_engine(bundle, load_bundle(bundle)[0])
    assert sizes == list(BATCH_SIZES) == [1, 2, 8]
    assert difference == pytest.approx(8e-4, rel=0.05)


@pytest.mark.parametrize("size", BATCH_SIZES)
def test_an_engine_that_errs_at_one_batch_size_is_unfit(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    open_altered(monkeypatch, lambda logits: logits + np.float32(0.1 if len(logits) == size else 0))
    with pytest.raises(UnfitEngineError, match=rf"seeded noise: the logits of engine eager \(fp32, batch of {size}\)"):
        prove_engine(bundle, load_bundle(bundle)[0])


def test_an_engine_that_cannot_be_opened_is_unfit(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_options: object) -> None:
        raise EngineError("not here")

    monkeypatch.setattr(proof, "open_engine", refuse)
    with pytest.raises(UnfitEngineError, match="not here"):
        prove_engine(bundle, load_bundle(bundle)[0])


def test_what_is_measured_lands_on_the_card_and_hashes_fit(bundle: Path, tmp_path: Path) -> None:
    model, card = load_bundle(bundle)
    seen: list[float] = []

    def measure(engine: Any, difference: float) -> dict[str, float]:
        seen.append(difference)
        return {"serve/top1": float(len(engine.run(np.zeros((2, 3, 32, 32), np.float32))))}

    card = card.model_copy(update={"metrics": {"val/top1": 0.5}})
    save_bundle(model, card, tmp_path / "new", prove=proving(measure))
    _, found = load_bundle(tmp_path / "new")
    assert found.metrics == {"val/top1": 0.5, "serve/top1": 2.0}
    assert len(seen) == 1


@pytest.mark.parametrize("meddled", ["weights", "batch"])
@pytest.mark.slow
def test_an_onnx_file_that_computes_something_else_never_becomes_a_bundle(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meddled: str
) -> None:
    real = zoo_bundle.export_onnx

    def export(model: torch.nn.Module, size: tuple[int, int], file: Path) -> None:
        real(model, size, file)
        made = onnx.load(file)
        if meddled == "batch":
            made.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
        else:
            (bias,) = [one for one in made.graph.initializer if one.name == "head.bias"]
            values = onnx.numpy_helper.to_array(bias) + np.float32(5e-4)  # less than the self-test at a load finds
            bias.raw_data = values.tobytes()
        file.write_bytes(made.SerializeToString())

    monkeypatch.setattr(zoo_bundle, "export_onnx", export)
    model, card = load_bundle(bundle)
    card = card.model_copy(update={"engine": ONNX_ENGINE})
    said = r"seeded noise: the logits of engine onnx" if meddled == "weights" else "fails at a batch of 3"
    with pytest.raises(UnfitEngineError, match=rf"{tmp_path / 'new'}.*{said}"):
        save_bundle(model, card, tmp_path / "new", prove=proving())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_honest_export_is_compared_and_kept(onnx_bundle: Path) -> None:
    engine, difference = prove_engine(onnx_bundle, load_bundle(onnx_bundle)[0])
    assert (engine.choice, engine.device) == (read_bundle_card(onnx_bundle).engine, "cpu")
    assert 0 < difference < 1e-5
    assert (onnx_bundle / ONNX).is_file()
