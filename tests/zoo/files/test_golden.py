"""Card, golden example and hashes of a bundle, read without torch."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.zoo.trained import bundle_of
from zoo.bundle import load_bundle
from zoo.errors import BundleError
from zoo.files.bundle_files import CARD, GOLDEN, ONNX, WEIGHTS, check_digests, digest, read_digests
from zoo.files.golden import check_files, compare_logits, read_bundle_card, read_golden, write_golden

ROOT = Path(__file__).parents[3]


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return bundle_of(tmp_path / "bundle")


def test_the_golden_example_is_what_torch_reads(bundle: Path) -> None:
    golden, tensors = read_golden(bundle, read_bundle_card(bundle)), load_file(bundle / GOLDEN)
    assert np.array_equal(golden.image, tensors["input"].numpy())
    assert np.array_equal(golden.logits, tensors["logits"].numpy())
    assert read_digests(golden.recorded) == {name: digest(bundle / name) for name in (WEIGHTS, CARD)}


def test_a_whole_bundle_passes_without_torch(bundle: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom zoo.files.golden import check_files\ncheck_files(Path(sys.argv[1]))"
    )
    blind = f"import sys\nsys.modules.update(torch=None, timm=None)\n{code}"
    done = subprocess.run([sys.executable, "-c", blind, bundle], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert check_files(bundle) == read_bundle_card(bundle)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def with_golden(bundle: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(bundle / GOLDEN).items()}
    change(tensors)
    save_file(tensors, bundle / GOLDEN)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda b: (b / CARD).unlink(), r"bundle: no card\.json in it: not a bundle$"),
        (lambda b: (b / GOLDEN).unlink(), r"golden\.safetensors: missing"),
        (lambda b: (b / WEIGHTS).unlink(), r"model\.safetensors: missing"),
        (lambda b: flip(b / WEIGHTS), r"model\.safetensors: damaged, it is not the file that was written"),
        (lambda b: flip(b / CARD), r"card\.json: "),
        (lambda b: (b / GOLDEN).write_bytes(b"\x80\x04."), r"golden\.safetensors: a pickle, not safetensors"),
        (
            lambda b: with_golden(b, lambda t: t.pop("logits")),
            r"golden\.safetensors: logits: got nothing, wanted \(1, 3\)",
        ),
        (
            lambda b: with_golden(b, lambda t: t.update(input=t["input"][:, :1].clone())),
            r"input: got \(1, 1, 32, 32\), wanted \(1, 3, 32, 32\) by the card's preprocessing\.size",
        ),
        (
            lambda b: with_golden(b, lambda t: t.update(logits=t["logits"].double())),
            "logits: got float64, wanted float32",
        ),
        (
            lambda b: with_golden(b, lambda t: t.update(logits=t["logits"].bfloat16())),
            r"golden\.safetensors: .*bfloat16",
        ),
        (lambda b: with_golden(b, len), r"model\.safetensors: damaged"),
    ],
)
def test_every_damage_is_named(bundle: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(bundle)
    with pytest.raises(BundleError, match=message) as caught:
        check_files(bundle)
    assert "\n" not in str(caught.value)


def test_a_model_onnx_that_was_written_with_it_is_held_to_its_hash(bundle: Path) -> None:
    golden = read_golden(bundle, read_bundle_card(bundle))
    (bundle / ONNX).write_bytes(b"any")
    check_files(bundle)  # a file beside the bundle's own is none of it
    write_golden(bundle, golden.image, golden.logits)
    check_files(bundle)
    for load in (check_files, load_bundle):
        flip(bundle / ONNX)
        with pytest.raises(BundleError, match=r"model\.onnx: damaged"):
            load(bundle)
        flip(bundle / ONNX)
        (bundle / ONNX).rename(bundle / "away")
        with pytest.raises(BundleError, match=r"model\.onnx: missing"):
            load(bundle)
        (bundle / "away").rename(bundle / ONNX)


@pytest.mark.parametrize("recorded", ["", "[]", "[" * 100_000, "null", json.dumps({WEIGHTS: 1}), '{"../x": "y"}'])
def test_hashes_that_cannot_be_read_count_as_damage(bundle: Path, recorded: str) -> None:
    with pytest.raises(BundleError, match=r"model\.safetensors: damaged"):
        check_digests(bundle, recorded)


def test_logits_are_compared_with_a_tolerance_and_nan_is_none() -> None:
    wanted = np.array([[0.5, 20.0]], np.float32)
    assert compare_logits(wanted + np.float32(0.01), wanted) == pytest.approx(0.01, rel=1e-3)
    for wrong in (wanted + np.float32(0.03), wanted * np.float32("nan")):
        with pytest.raises(BundleError, match=r"logits differ by .* more than 0\.02: these are not the same weights"):
            compare_logits(wrong, wanted)
