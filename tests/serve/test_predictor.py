from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from serve.engines.eager import EagerEngine
from serve.engines.engine import EngineOptions
from serve.predictor import Predictor
from zoo.bundle import load_bundle
from zoo.card import EngineChoice
from zoo.errors import BundleError


def batch(seed: int, count: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 3, 32, 32), dtype=np.float32)


def test_predict_is_the_softmax_of_the_models_logits(predictor: Predictor, bundle: Path) -> None:
    model, _ = load_bundle(bundle)
    with torch.inference_mode():
        wanted = model(torch.from_numpy(batch(0))).softmax(-1).numpy()
    got = predictor.predict(batch(0))
    np.testing.assert_allclose(got, wanted, rtol=1e-6)  # numpy's exp and torch's round otherwise
    assert got.dtype == np.float32


def test_threads_get_each_their_own_answer(predictor: Predictor) -> None:
    alone = [predictor.predict(batch(seed)) for seed in range(16)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda seed: predictor.predict(batch(seed)), range(16)))
    assert all(np.array_equal(a, b) for a, b in zip(alone, together, strict=True))


def test_label_names_the_best_first_and_keeps_class_order_among_equals(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = np.array([[0.2, 0.5, 0.3], [0.4, 0.2, 0.4]], dtype=np.float32)
    monkeypatch.setattr(predictor, "predict", lambda _: rows)
    first, second = predictor.label(batch(0), top_k=2)
    assert [score.label for score in first.top] == ["é", "ash"]
    assert (first.label, first.probability) == ("é", 0.5)
    assert [score.label for score in second.top] == ["日本 語", "ash"]


def test_a_model_that_answers_nan_is_our_fault(bundle: Path) -> None:
    model, card = load_bundle(bundle)
    with torch.no_grad():
        model.get_parameter("head.bias").fill_(float("nan"))
    engine = EagerEngine(model, card, EngineChoice(), EngineOptions(device="cpu"))
    with pytest.raises(RuntimeError, match="not finite"):
        Predictor(engine, card).predict(batch(0))


def test_the_self_tests_difference_is_kept(predictor: Predictor) -> None:
    assert predictor.difference is not None
    assert 0 <= predictor.difference < 1e-5  # the same engine on the same machine; a batch rounds otherwise


def test_a_folder_without_a_card_is_one_clear_line(tmp_path: Path, bundle: Path) -> None:
    with pytest.raises(BundleError, match=r"nowhere: no bundle here, a directory with card\.json"):
        Predictor.from_bundle(tmp_path / "nowhere")
    with pytest.raises(BundleError, match=r"no card\.json in it: not a bundle") as caught:
        Predictor.from_bundle(bundle.parent)
    assert "Errno" not in str(caught.value)
