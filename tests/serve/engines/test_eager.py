from pathlib import Path

import numpy as np
import pytest
import torch

from serve.engines.eager import EagerEngine, build_engine, find_device
from serve.engines.engine import EngineOptions
from serve.errors import EngineError
from zoo.bundle import load_bundle
from zoo.card import EngineChoice
from zoo.errors import BundleError

CPU = EngineOptions(device="cpu", max_batch=4)


def batch(count: int) -> np.ndarray:
    return np.random.default_rng(count).standard_normal((count, 3, 32, 32), dtype=np.float32)


def build(bundle: Path, precision: str = "fp32", options: EngineOptions = CPU) -> EagerEngine:
    model, card = load_bundle(bundle)
    return EagerEngine(model, card, EngineChoice(precision=precision), options)


@pytest.mark.parametrize("count", [1, 4, 5, 9])
def test_a_batch_of_any_size_gets_the_models_own_logits(bundle: Path, count: int) -> None:
    model, _ = load_bundle(bundle)
    with torch.inference_mode():
        wanted = model(torch.from_numpy(batch(count))).numpy()
    got = build(bundle).run(batch(count))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)  # cut up, it rounds otherwise
    assert got.dtype == np.float32


def test_no_pass_is_larger_than_the_largest_batch(bundle: Path) -> None:
    model, card = load_bundle(bundle)
    sizes: list[int] = []
    model.register_forward_pre_hook(lambda _module, given: sizes.append(len(given[0])))
    engine = EagerEngine(model, card, EngineChoice(), CPU)
    engine.run(batch(9))
    assert sizes == [4, 4, 1]
    sizes.clear()
    engine.warm_up()
    assert sizes == [1, 4]


def test_bf16_is_autocasts_and_its_answer_is_float32(bundle: Path) -> None:
    model, _ = load_bundle(bundle)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        wanted = model(torch.from_numpy(batch(4))).float().numpy()
    got = build(bundle, "bf16").run(batch(4))
    assert np.array_equal(got, wanted)
    assert got.dtype == np.float32
    difference = np.abs(got - build(bundle).run(batch(4))).max()
    assert 1e-4 < difference < 5e-2 * np.abs(got).max(), "it is not float32, and near it"


def test_threads_are_torchs_of_the_process_and_only_where_given(bundle: Path) -> None:
    before = torch.get_num_threads()
    try:
        build(bundle, options=EngineOptions(device="cpu", threads=before + 1))
        assert torch.get_num_threads() == before + 1
        build(bundle, options=EngineOptions(device="cpu"))
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_a_gpu_that_is_not_there_is_named() -> None:
    wanted = f"cuda:{torch.cuda.device_count() if torch.cuda.is_available() else 0}"
    with pytest.raises(EngineError, match=rf"device {wanted}: torch finds \d GPUs here; give --device cpu, or auto"):
        find_device(wanted)
    assert find_device("cpu").type == "cpu"
    assert find_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_a_damaged_bundle_is_refused(bundle: Path, tmp_path: Path) -> None:
    for file in bundle.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    _, card = load_bundle(bundle)
    with pytest.raises(BundleError, match=r"model\.safetensors: damaged"):
        build_engine(tmp_path, card, EngineChoice(), CPU)
