from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serve.engines.self_test import COPIES, TOLERANCES, check_engine, compare, tell
from serve.errors import EngineError
from zoo.card import EngineChoice, ModelCard
from zoo.errors import BundleError
from zoo.files.golden import Golden, read_bundle_card, read_golden


class Fixed:
    """An engine that answers the golden logits, changed by `change`."""

    device = "cpu"

    def __init__(self, golden: Golden, change: Any, precision: Any = "fp32") -> None:
        self.choice = EngineChoice(precision=precision)
        self._golden, self._change = golden, change
        self.asked: list[np.ndarray] = []

    def run(self, images: np.ndarray) -> np.ndarray:
        self.asked.append(images)
        return self._change(np.repeat(self._golden.logits, len(images), axis=0))

    def warm_up(self) -> None:
        raise AssertionError("not asked for")


@pytest.fixture
def card(bundle: Path) -> ModelCard:
    return read_bundle_card(bundle)


@pytest.fixture
def golden(bundle: Path, card: ModelCard) -> Golden:
    return read_golden(bundle, card)


def moved(by: float) -> Any:
    def move(logits: np.ndarray) -> np.ndarray:
        logits = logits.copy()
        logits[-1, 0] += by * max(1.0, float(np.abs(logits).max()))
        return logits

    return move


def test_the_golden_example_is_asked_alone_and_in_a_batch(bundle: Path, card: ModelCard, golden: Golden) -> None:
    engine = Fixed(golden, moved(1e-4))
    assert check_engine(engine, bundle, card) == pytest.approx(
        1e-4 * max(1.0, float(np.abs(golden.logits).max())), rel=0.05
    )
    assert [len(images) for images in engine.asked] == [1, COPIES]
    assert all((images == golden.image).all() for images in engine.asked)


@pytest.mark.parametrize(("precision", "by"), [("fp32", 2e-3), ("bf16", 6e-2), ("fp32", np.nan), ("fp32", np.inf)])
def test_logits_beyond_the_tolerance_name_engine_and_precision(
    bundle: Path, card: ModelCard, golden: Golden, precision: str, by: float
) -> None:
    message = rf"golden\.safetensors: the logits of engine eager \({precision}, batch of 1\) differ by .* tolerance"
    with np.errstate(invalid="ignore"), pytest.raises(BundleError, match=message):
        check_engine(Fixed(golden, moved(by), precision), bundle, card)


def test_bf16_may_differ_by_what_bf16_rounds(bundle: Path, card: ModelCard, golden: Golden) -> None:
    assert check_engine(Fixed(golden, moved(4e-2), "bf16"), bundle, card) > TOLERANCES["fp32"]


def test_an_engine_that_errs_in_batches_alone_is_caught(bundle: Path, card: ModelCard, golden: Golden) -> None:
    def mix(logits: np.ndarray) -> np.ndarray:
        return logits if len(logits) == 1 else moved(0.5)(logits)

    with pytest.raises(BundleError, match=f"batch of {COPIES}"):
        check_engine(Fixed(golden, mix), bundle, card)


def test_logits_of_another_shape_are_named() -> None:
    choice = EngineChoice(name="onnx")
    with pytest.raises(BundleError, match=r"x: engine onnx: got logits of \(2, 4\), wanted \(2, 3\)"):
        compare(np.zeros((2, 4)), np.zeros((2, 3)), choice, "x")
    with pytest.raises(BundleError, match=r"got logits of \(1, 3\), wanted \(2, 3\)"):
        compare(np.zeros((1, 3)), np.zeros((2, 3)), choice, "x")


def test_a_closer_tolerance_counts_a_wider_one_does_not() -> None:
    near = np.full((1, 3), 5e-4, np.float32)
    assert compare(near, np.zeros((1, 3)), EngineChoice(), "x") == pytest.approx(5e-4)
    with pytest.raises(BundleError, match=r"more than the tolerance 0\.0001"):
        compare(near, np.zeros((1, 3)), EngineChoice(), "x", 1e-4)
    with pytest.raises(BundleError, match=r"more than the tolerance 0\.001"):
        compare(near * 4, np.zeros((1, 3)), EngineChoice(), "x", 1.0)


def test_an_error_of_many_lines_is_told_in_one() -> None:
    assert tell(ValueError("\n  first\nsecond")) == "ValueError: first"
    assert tell(KeyError()) == "KeyError"


def test_an_engine_that_fails_is_one_line(bundle: Path, card: ModelCard, golden: Golden) -> None:
    def fail(_logits: np.ndarray) -> np.ndarray:
        raise RuntimeError("no such\nkernel")

    with pytest.raises(
        EngineError, match=r"golden\.safetensors: engine eager fails at a batch of 1: RuntimeError: no such$"
    ):
        check_engine(Fixed(golden, fail), bundle, card)
