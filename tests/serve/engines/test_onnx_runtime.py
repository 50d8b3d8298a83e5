"""The engine of ONNX Runtime on a bundle that was exported, and on bundles whose model.onnx was meddled with."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from serve.engines import onnx_runtime
from serve.engines.eager import build_engine as build_eager
from serve.engines.engine import EngineOptions
from serve.engines.onnx_runtime import OnnxEngine, build_engine
from serve.engines.opening import open_engine
from serve.errors import EngineError
from zoo.bundle import load_bundle
from zoo.card import EngineChoice
from zoo.errors import BundleError, ExportError
from zoo.files.bundle_files import CARD, GOLDEN, ONNX, WEIGHTS
from zoo.files.golden import read_bundle_card, read_golden, write_golden

pytestmark = pytest.mark.slow  # each process exports first
CHOICE = EngineChoice(name="onnx")
CPU = EngineOptions(device="cpu", threads=1, max_batch=4)


@pytest.fixture
def copy(onnx_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(onnx_bundle, tmp_path / "copy"))


def build(path: Path, options: EngineOptions = CPU) -> OnnxEngine:
    return build_engine(path, read_bundle_card(path), CHOICE, options)


def meddle(path: Path, change: Callable[[onnx.ModelProto], object]) -> None:
    """Change model.onnx as somebody would who makes the hashes fit."""
    model = onnx.load(path / ONNX, load_external_data=False)
    change(model)
    (path / ONNX).write_bytes(model.SerializeToString())
    rehash(path)


def rehash(path: Path) -> None:
    golden = read_golden(path, read_bundle_card(path))
    write_golden(path, golden.image, golden.logits)


def test_the_bundle_holds_the_file_and_its_hash_and_no_path(onnx_bundle: Path) -> None:
    assert sorted(file.name for file in onnx_bundle.iterdir()) == [CARD, GOLDEN, ONNX, WEIGHTS]
    recorded = json.loads(read_golden(onnx_bundle, read_bundle_card(onnx_bundle)).recorded)
    assert sorted(recorded) == [CARD, ONNX, WEIGHTS]
    content = (onnx_bundle / ONNX).read_bytes()
    assert not [word for word in (b"site-packages", b".py", b"/work", b"stack_trace") if word in content]
    assert (onnx_bundle / ONNX).stat().st_mode == (onnx_bundle / CARD).stat().st_mode


@pytest.mark.parametrize("count", [1, 2, 3, 4, 11])
def test_any_batch_gets_eager_torchs_logits(onnx_bundle: Path, count: int) -> None:
    images = np.random.default_rng(count).standard_normal((count, 3, 32, 32), dtype=np.float32)
    eager = build_eager(onnx_bundle, read_bundle_card(onnx_bundle), EngineChoice(), CPU)
    got, wanted = build(onnx_bundle).run(images), eager.run(images)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)
    assert (got.dtype, got.shape) == (np.float32, (count, 3))


def test_the_session_sleeps_between_batches_and_has_the_threads_asked_for(onnx_bundle: Path) -> None:
    engine = build(onnx_bundle, EngineOptions(device="cpu", threads=3))
    options = engine._session.get_session_options()
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (3, 1)
    assert engine.device == "cpu"


def test_warm_up_runs_one_image_and_a_full_batch(onnx_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sizes = build(onnx_bundle), []
    run = engine.run
    monkeypatch.setattr(engine, "run", lambda images: (sizes.append(len(images)), run(images))[1])
    engine.warm_up()
    assert sizes == [1, 4]


def test_load_bundle_still_gives_the_torch_model(onnx_bundle: Path) -> None:
    model, card = load_bundle(onnx_bundle)
    assert card.engine == CHOICE
    assert not model.training


def test_bf16_is_refused_with_the_way_out(onnx_bundle: Path) -> None:
    choice = EngineChoice(name="onnx", precision="bf16")
    with pytest.raises(
        EngineError, match="engine onnx computes in fp32, and bf16 was asked for: give --precision fp32"
    ):
        open_engine(onnx_bundle, read_bundle_card(onnx_bundle), choice=choice)


def test_a_bundle_without_the_file_says_how_to_make_one(bundle: Path, copy: Path) -> None:
    with pytest.raises(EngineError, match=r"no model\.onnx was saved with it.*python -m serve\.equip .* --engine onnx"):
        open_engine(bundle, read_bundle_card(bundle), choice=CHOICE)
    shutil.copy(copy / ONNX, copy / "kept")
    (copy / ONNX).unlink()
    rehash(copy)
    shutil.copy(copy / "kept", copy / ONNX)  # beside the bundle's files, and none of them
    with pytest.raises(EngineError, match=r"no model\.onnx was saved with it"):
        build(copy)


def flip(path: Path) -> None:
    content = bytearray((path / ONNX).read_bytes())
    content[len(content) // 2] ^= 1
    (path / ONNX).write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / ONNX).unlink(), r"model\.onnx: missing"),
        (flip, r"model\.onnx: damaged, it is not the file that was written"),
        (lambda path: (path / ONNX).write_bytes(b""), r"model\.onnx: damaged"),
        (lambda path: (path / WEIGHTS).unlink(), r"model\.safetensors: missing"),
        (lambda path: (path / GOLDEN).unlink(), r"golden\.safetensors: missing"),
    ],
)
def test_a_file_that_is_lost_or_changed_is_named_by_both_ways_of_loading(
    copy: Path, damage: Callable[[Path], object], message: str
) -> None:
    card = read_bundle_card(copy)
    damage(copy)
    for load in (lambda: open_engine(copy, card), lambda: load_bundle(copy)):
        with pytest.raises(BundleError, match=message):
            load()


def to_another_file(model: onnx.ModelProto) -> None:
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../../../etc/passwd")


def to_another_library(model: onnx.ModelProto) -> None:
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    model.graph.node[0].domain = "com.microsoft"


def to_other_weights(model: onnx.ModelProto) -> None:
    tensor = next(one for one in model.graph.initializer if one.name == "head.bias")
    tensor.raw_data = np.ones(3, np.float32).tobytes()


def to_another_name(model: onnx.ModelProto) -> None:
    model.graph.output[0].name = "other"
    next(node for node in model.graph.node if "logits" in node.output).output[0] = "other"


def to_one_image(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1


def to_nonsense(model: onnx.ModelProto) -> None:
    model.graph.node[0].op_type = "NoSuchOperator"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (to_another_file, ExportError, r"model\.onnx: it keeps weights in another file, which is never read"),
        (to_another_library, ExportError, r"model\.onnx: it wants operators of 'com\.microsoft'"),
        (to_other_weights, BundleError, r"golden\.safetensors: the logits of engine onnx \(fp32, batch of 1\) differ"),
        (to_another_name, EngineError, r"got inputs and outputs image, other, wanted image and logits"),
        (to_one_image, EngineError, "engine onnx fails at a batch of 3: InvalidArgument"),
        (to_nonsense, EngineError, r"model\.onnx: ONNX Runtime cannot run it: .*NoSuchOperator"),
    ],
)
def test_a_hostile_or_wrong_file_whose_hash_fits_never_answers(
    copy: Path, change: Callable[[onnx.ModelProto], object], error: type[Exception], message: str
) -> None:
    meddle(copy, change)
    with pytest.raises(error, match=message) as caught:
        open_engine(copy, read_bundle_card(copy), options=CPU)
    assert "\n" not in str(caught.value)
    assert "passwd" not in str(caught.value)


def test_devices_are_what_this_onnxruntime_has(onnx_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, cpu = "CUDAExecutionProvider", "CPUExecutionProvider"
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [cpu])
    assert onnx_runtime._choose_providers("auto") == onnx_runtime._choose_providers("cpu") == [cpu]
    with pytest.raises(
        EngineError, match=r"device cuda:1: this onnxruntime .* runs on CPUs alone; install onnxruntime-"
    ):
        build(onnx_bundle, EngineOptions(device="cuda:1"))
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [cuda, cpu])
    assert onnx_runtime._choose_providers("cpu") == [cpu]
    wanted: Any = [(cuda, {"device_id": "1"}), cpu]
    assert onnx_runtime._choose_providers("cuda:1") == wanted
    assert onnx_runtime._choose_providers("auto")[0] == (cuda, {"device_id": "0"})


def test_a_card_of_the_first_format_is_still_served(bundle: Path, tmp_path: Path) -> None:
    old = Path(shutil.copytree(bundle, tmp_path / "old"))
    golden = read_golden(old, read_bundle_card(old))
    card = json.loads((old / CARD).read_text(encoding="utf-8")) | {"format_version": 1}
    del card["engine"]
    (old / CARD).write_text(json.dumps(card), encoding="utf-8")
    write_golden(old, golden.image, golden.logits)
    assert open_engine(old, read_bundle_card(old))[0].choice == EngineChoice()
