import ast
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import mlflow
import numpy as np
import onnx
import pytest
from starlette.testclient import TestClient

import zoo
from serve.models.locate import locate_model
from serve.package import build_signature, log_bundle
from serve.predictor import Predictor
from zoo.errors import BundleError, MissingPluginError, UnfitEngineError
from zoo.files.bundle_files import ONNX
from zoo.files.golden import read_bundle_card, read_golden, write_golden
from zoo.preprocess import preprocess

# MLflow's own, not ours to mend
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")


@pytest.mark.slow
def test_the_bundle_comes_out_of_the_registry_byte_for_byte(registered: str, bundle: Path, tmp_path: Path) -> None:
    located = locate_model(registered, tmp_path)
    assert (located.name, located.version) == ("tiny", "1")
    assert {file.name: file.read_bytes() for file in located.bundle.iterdir()} == {
        file.name: file.read_bytes() for file in bundle.iterdir()
    }


@pytest.mark.slow
def test_the_model_holds_no_pickle_and_names_what_it_needs(registered: str) -> None:
    folder = Path(mlflow.artifacts.download_artifacts(registered))
    names = [file.name for file in folder.rglob("*") if file.is_file()]
    assert not [name for name in names if name.endswith((".pkl", ".pickle", ".pt", ".pth", ".bin"))]
    requirements = (folder / "requirements.txt").read_text(encoding="utf-8")
    assert "timm==" in requirements
    assert "+" not in requirements  # a local build tag is on no index
    assert (folder / "code" / "zoo" / "bundle.py").is_file()
    assert (folder / "code" / "serve" / "predictor.py").is_file()


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        assert server.poll() is None, "the server died"
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
        else:
            return
    raise AssertionError(f"{url} does not answer")


@pytest.fixture(scope="module")
def mlflow_server(store: str, registered: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`mlflow models serve` on a free port, started outside the repository."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tmp_path_factory.mktemp("elsewhere")
    command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", registered, "--env-manager", "local"]
    env = os.environ | {
        "MLFLOW_TRACKING_URI": store,
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            env=env,
            cwd=folder,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            wait_for(f"http://127.0.0.1:{port}/ping", server)
            yield f"http://127.0.0.1:{port}/invocations"
        finally:
            os.killpg(server.pid, 15)
            server.wait(30)


def ask(url: str, body: object) -> dict[str, list[dict[str, object]]]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.load(response)
    assert isinstance(answer, dict)
    return answer


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", ["dataframe_split", "dataframe_records", "inputs", "inputs list", "instances", "instances list"]
)
def test_mlflows_own_server_gives_our_numbers(
    mlflow_server: str, client: TestClient, texts: list[str], form: str
) -> None:
    body = {
        "dataframe_split": {"dataframe_split": {"columns": ["image"], "data": [[text] for text in texts]}},
        "dataframe_records": {"dataframe_records": [{"image": text} for text in texts]},
        "inputs": {"inputs": {"image": texts}},
        "inputs list": {"inputs": texts},
        "instances": {"instances": [{"image": text} for text in texts]},
        "instances list": {"instances": texts},
    }[form]
    for params in ({}, {"params": {"top_k": 2}}):
        theirs = ask(mlflow_server, body | params)
        ours = client.post("/invocations", json=body | params).json()
        assert [len(p["top"]) for p in ours["predictions"]] == [2 if params else 3] * 3
        flat = [[(s["label"], s["probability"]) for s in p["top"]] for p in theirs["predictions"]]
        want = [[(s["label"], s["probability"]) for s in p["top"]] for p in ours["predictions"]]
        for row, wanted in zip(flat, want, strict=True):
            assert [label for label, _ in row] == [label for label, _ in wanted]
            assert [p for _, p in row] == pytest.approx([p for _, p in wanted], abs=1e-6)  # another thread count
        assert [p["label"] for p in theirs["predictions"]] == [p["label"] for p in ours["predictions"]]


def test_the_signature_has_the_one_column() -> None:
    signature = build_signature().to_dict()
    assert json.loads(signature["inputs"]) == [{"type": "binary", "name": "image", "required": True}]
    assert [column["name"] for column in json.loads(signature["outputs"])] == ["label", "probability", "top"]


def test_a_bundle_whose_plugin_is_not_loaded_is_refused(plugin_bundle: Path) -> None:
    with pytest.raises(MissingPluginError, match=r"'mine' is not registered here: it needs the file my_attention\.py"):
        log_bundle(plugin_bundle)


ASK = """
import sys, warnings
warnings.simplefilter("ignore")
import mlflow.pyfunc, pandas
model = mlflow.pyfunc.load_model(sys.argv[1])
image = open(sys.argv[2], "rb").read()
print(model.predict(pandas.DataFrame({"image": [image]}))[0]["top"])
import zoo
print(zoo.list_attentions(), zoo.plugin_sources("mine")[0].name)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("own_plugins")
def test_a_plugin_ships_with_the_model_as_it_was_loaded_and_works_in_a_fresh_process(
    store: str, plugin_bundle: Path, images: list[bytes], tmp_path: Path
) -> None:
    file = tmp_path / "my_attention.py"
    file.write_bytes((plugin_bundle.parent / "my_attention.py").read_bytes())
    zoo.load_plugins(file)
    file.write_text("1 / 0  # edited since")
    mlflow.set_experiment("zoo")
    with mlflow.start_run():
        uri = log_bundle(plugin_bundle)
    folder = Path(mlflow.artifacts.download_artifacts(uri))
    shipped = folder / "code" / "plugins" / "my_attention.py"
    assert shipped.read_bytes() == (plugin_bundle.parent / "my_attention.py").read_bytes()
    assert not list((folder / "artifacts").rglob("*.py"))
    (tmp_path / "image.png").write_bytes(images[0])
    command = [sys.executable, "-c", ASK, uri, str(tmp_path / "image.png")]
    env = os.environ | {"MLFLOW_TRACKING_URI": store, "OMP_NUM_THREADS": "1", "ZOO_PLUGIN_FILES": "[]"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    top, names = done.stdout.splitlines()[-2:]
    assert names == "('linear', 'mine', 'parameter', 'separate') my_attention.py"
    ours = Predictor.from_bundle(plugin_bundle)
    (want,) = ours.label(preprocess(images[0], ours.card.preprocessing)[None])
    assert [score["label"] for score in ast.literal_eval(top)] == [score.label for score in want.top]


ASK_BLIND = """
import sys
sys.modules.update(torch=None, timm=None, torchvision=None)
import warnings
warnings.simplefilter("ignore")
import json, mlflow.pyfunc, pandas
model = mlflow.pyfunc.load_model(sys.argv[1])
image = open(sys.argv[2], "rb").read()
print(json.dumps(model.predict(pandas.DataFrame({"image": [image]}))[0]["top"]))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("own_plugins")
def test_an_onnx_model_needs_neither_torch_nor_its_plugin_and_gives_the_endpoints_numbers(
    store: str, plugin_onnx_bundle: Path, images: list[bytes], tmp_path: Path
) -> None:
    zoo.load_plugins(plugin_onnx_bundle.parent / "my_attention.py")
    mlflow.set_experiment("zoo")
    with mlflow.start_run():
        uri = log_bundle(plugin_onnx_bundle)
    folder = Path(mlflow.artifacts.download_artifacts(uri))
    requirements = (folder / "requirements.txt").read_text(encoding="utf-8")
    assert "onnxruntime==" in requirements
    assert "torch" not in requirements
    assert "timm" not in requirements
    assert not (folder / "code" / "plugins").exists()
    (tmp_path / "image.png").write_bytes(images[0])
    command = [sys.executable, "-c", ASK_BLIND, uri, str(tmp_path / "image.png")]
    env = os.environ | {"MLFLOW_TRACKING_URI": store, "ZOO_PLUGIN_FILES": "[]"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ours = Predictor.from_bundle(plugin_onnx_bundle)
    (want,) = ours.label(preprocess(images[0], ours.card.preprocessing)[None])
    assert json.loads(done.stdout.splitlines()[-1]) == [score.model_dump() for score in want.top]


@pytest.mark.slow
def test_an_onnx_file_that_nobody_compared_is_not_published(onnx_bundle: Path, tmp_path: Path) -> None:
    """Its self-test passes: what differs is within the tolerance of another machine, or in other batch sizes."""
    path = Path(shutil.copytree(onnx_bundle, tmp_path / "bundle"))
    card = read_bundle_card(path)
    golden = read_golden(path, card)
    model = onnx.load(path / ONNX)
    (bias,) = [one for one in model.graph.initializer if one.name == "head.bias"]
    bias.raw_data = (onnx.numpy_helper.to_array(bias) + np.float32(5e-4)).tobytes()
    (path / ONNX).write_bytes(model.SerializeToString())
    write_golden(path, golden.image, golden.logits)
    Predictor.from_bundle(path)
    with pytest.raises(UnfitEngineError, match="seeded noise: the logits of engine onnx"):
        log_bundle(path)


def test_log_bundle_starts_no_run_of_its_own(bundle: Path) -> None:
    with pytest.raises(RuntimeError, match="active MLflow run"):
        log_bundle(bundle)


def test_a_bundle_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"nowhere: no bundle here, a directory with card\.json"):
        log_bundle(tmp_path / "nowhere")
