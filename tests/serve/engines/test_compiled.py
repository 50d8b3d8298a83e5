from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from serve.engines import compiled
from serve.engines.compiled import CompiledEngine, build_engine
from serve.engines.eager import EagerEngine
from serve.engines.engine import EngineOptions
from serve.engines.opening import open_engine
from serve.errors import EngineError
from zoo.bundle import load_bundle
from zoo.card import EngineChoice
from zoo.files.golden import read_bundle_card

CHOICE = EngineChoice(name="compile")
CPU = EngineOptions(device="cpu", max_batch=8)


def batch(count: int) -> np.ndarray:
    return np.random.default_rng(count).standard_normal((count, 3, 32, 32), dtype=np.float32)


@pytest.mark.slow
def test_one_program_serves_every_batch_size_but_one(bundle: Path) -> None:
    model, card = load_bundle(bundle)
    eager = EagerEngine(model, card, EngineChoice(), CPU)
    before = counters["stats"]["unique_graphs"]
    engine, difference = open_engine(bundle, card, choice=CHOICE, options=CPU)
    engine.warm_up()
    made = counters["stats"]["unique_graphs"] - before
    assert made == 2
    assert difference < 1e-4
    for count in (1, 2, 3, 5, 8, 11):
        np.testing.assert_allclose(engine.run(batch(count)), eager.run(batch(count)), rtol=0, atol=1e-4)
    assert counters["stats"]["unique_graphs"] - before == made, "no request waits for a compiler"


def test_a_compiler_that_is_missing_is_one_line_with_the_way_out(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_images: Any) -> None:
        raise RuntimeError("\nInvalidCxxCompiler: No working C++ compiler found\nand more")

    monkeypatch.setattr(torch, "compile", lambda _model, **_how: fail)
    message = r"torch\.compile cannot compile it here \(RuntimeError: InvalidCxxCompiler: No working .*--engine eager"
    with pytest.raises(EngineError, match=message) as caught:
        build_engine(bundle, read_bundle_card(bundle), CHOICE, CPU)
    assert "\n" not in str(caught.value)


def test_where_shapes_are_fixed_a_batch_is_filled_up_to_a_prepared_size(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU's graphs get, with the plain model in their place."""
    monkeypatch.setattr(torch, "compile", lambda model, **_how: model)
    model, card = load_bundle(bundle)
    engine = CompiledEngine(model, card, CHOICE, CPU)
    engine._fixed, engine.batch_sizes = True, compiled.list_batch_sizes(8)
    sizes: list[int] = []
    model.register_forward_pre_hook(lambda _module, given: sizes.append(len(given[0])))
    eager = EagerEngine(load_bundle(bundle)[0], card, EngineChoice(), CPU)
    for count in (1, 3, 4, 7, 11):
        np.testing.assert_allclose(engine.run(batch(count)), eager.run(batch(count)), rtol=0, atol=1e-5)
    assert sizes == [1, 4, 4, 8, 8, 4]
    sizes.clear()
    engine.warm_up()
    assert sizes == [size for size in (1, 2, 4, 8) for _ in range(3)]
