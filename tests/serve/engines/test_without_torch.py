"""An ONNX bundle is read, proven and answers in a process where torch cannot be imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from serve.predictor import Predictor
from zoo.preprocess import preprocess

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "timm", "torchvision", "mlflow", "onnx"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])

sys.meta_path.insert(0, Blocked())
"""
ANSWER = """
import json
from pathlib import Path
from serve.engines.engine import EngineOptions
from serve.predictor import Predictor
from zoo.preprocess import preprocess

predictor = Predictor.from_bundle(Path(sys.argv[1]), options=EngineOptions(threads=1))
predictor.engine.warm_up()
image = preprocess(Path(sys.argv[2]).read_bytes(), predictor.card.preprocessing)
print(json.dumps([predictor.difference, predictor.predict(image[None]).tolist()]))
"""


def run(code: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-W", "error", "-c", BLOCK + code, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)


def test_an_onnx_bundle_answers_where_there_is_no_torch(
    bundle: Path, onnx_bundle: Path, images: list[bytes], tmp_path: Path
) -> None:
    (tmp_path / "image.png").write_bytes(images[0])
    done = run(ANSWER, onnx_bundle, tmp_path / "image.png")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    difference, (row,) = json.loads(done.stdout)
    assert 0 <= difference < 1e-5
    eager = Predictor.from_bundle(bundle)
    assert row == pytest.approx(eager.predict(preprocess(images[0], eager.card.preprocessing)[None])[0], abs=1e-5)


def test_an_eager_bundle_names_the_package_it_takes(bundle: Path) -> None:
    done = run(ANSWER, bundle, "-")
    assert done.stderr.splitlines()[-1].startswith(
        "serve.errors.EngineError: the engine eager takes the package torch, which is not installed here: install it"
    )
    assert "python -m serve.equip" in done.stderr.splitlines()[-1]


def test_a_plugins_onnx_bundle_needs_neither_torch_nor_the_plugin(
    plugin_onnx_bundle: Path, images: list[bytes], tmp_path: Path
) -> None:
    (tmp_path / "image.png").write_bytes(images[0])
    done = run(ANSWER, plugin_onnx_bundle, tmp_path / "image.png")
    assert done.returncode == 0, done.stderr


MODULES = """
import importlib
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def test_what_serves_imports_no_torch_by_itself() -> None:
    """All of serve but the engines of torch, and what reads MLflow's registry or packages for it."""
    files = [file.relative_to(ROOT).with_suffix("") for file in (ROOT / "serve").rglob("*.py")]
    names = {".".join(file.parts).removesuffix(".__init__") for file in files}
    of_torch = {"serve.engines.eager", "serve.engines.compiled"}
    of_mlflow = {"serve.models.registry", "serve.package", "serve.pyfunc_model"}
    assert of_torch | of_mlflow <= names
    done = run(MODULES, *sorted(names - of_torch - of_mlflow))
    assert done.returncode == 0, done.stderr
