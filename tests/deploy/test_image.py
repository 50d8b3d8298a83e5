"""The Dockerfile and what it runs while it builds; the images themselves are built and run by `.ci/container`."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from serve.predictor import Predictor
from tests.serve.conftest import bundle  # noqa: F401  (a fixture)

ROOT = Path(__file__).parent.parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
STAGES = {
    name: text
    for text, name in re.findall(r"^(FROM \S+ AS (\S+)\n.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
}
TORCH = {"torch", "torchvision", "timm", "einops"}


def listed_by(stage: str) -> set[str]:
    """Run the stage's line that derives requirements from pyproject.toml; return their names."""
    (code,) = re.findall(r'python -c "(import.*?)" > requirements.txt', STAGES[stage], re.DOTALL)
    done = subprocess.run(
        ["bash", "-c", f'"{sys.executable}" -c "{code}"'], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {re.split(r"[^\w.-]", line)[0] for line in done.stdout.splitlines()}


def names_of(*extras: str) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    return {re.split(r"[^\w.-]", line)[0] for each in lists for line in each}


def test_images_install_what_pyproject_lists():
    assert listed_by("slim") == names_of("serve") - TORCH
    assert listed_by("dependencies") == names_of("serve")
    assert listed_by("dependencies") | listed_by("train") >= names_of("serve", "train", "postgres") - {"attention-zoo"}


def test_the_default_is_the_endpoint_without_torch():
    assert list(STAGES)[-1] == "serve"
    assert "COPY --from=slim" in STAGES["serve"]
    assert "dependencies" not in STAGES["serve"]
    assert STAGES["serve-torch"].startswith("FROM dependencies ")


@pytest.mark.parametrize("stage", ["serve", "serve-torch"])
def test_both_endpoints_start_stop_and_are_probed_alike(stage):
    shared = re.findall(
        r"^(?:USER|EXPOSE|STOPSIGNAL|HEALTHCHECK|ENTRYPOINT|WORKDIR|    CMD) .*$", STAGES[stage], re.MULTILINE
    )
    assert [line.split()[0] for line in shared] == [
        "WORKDIR",
        "USER",
        "EXPOSE",
        "STOPSIGNAL",
        "HEALTHCHECK",
        "CMD",
        "ENTRYPOINT",
    ]
    for line in shared:
        assert line in STAGES["serve"]
    assert "/ready" in shared[5]


def test_nothing_gets_into_a_build_but_what_it_copies():
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    assert patterns[0] == "*"
    let_in = {line[1:] for line in patterns if line.startswith("!")}
    words = [line.split()[1:-1] for line in DOCKERFILE.splitlines() if re.match(r"COPY (?!--from)", line)]
    copied = {word for each in words for word in each if "$" not in word}
    copied |= set(re.findall(r"--mount=type=bind,source=(\S+?),", DOCKERFILE))
    assert {path for path in let_in if not path.startswith("bundles")} == copied
    assert all((ROOT / path).exists() for path in copied)
    files = {path.rpartition("/")[2] for path in let_in if path.startswith("bundles/")}
    assert files == {"card.json", "golden.safetensors", "model.onnx", "model.safetensors"}


def test_what_is_left_out_is_known_by_that_name():
    (names,) = re.findall(r'^ARG LEAVE_OUT="(.*)"$', STAGES["slim"], re.MULTILINE)
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower().replace("_", "-")
    unknown = [name for name in names.split() if f"\n{name.lower().replace('_', '-')}==" not in pinned]
    assert unknown == ["pip", "setuptools"]


def find_files(site: Path) -> list[str]:
    return sorted(str(path.relative_to(site)) for path in site.rglob("*") if path.is_file())


@pytest.fixture
def slim() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "deploy" / "serve" / "slim.py"))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site-packages with the distributions `one` and `two`, which share a namespace."""
    site = tmp_path / "site"
    for name in ("one", "two"):
        info, package = site / f"{name}_zoo-1.0.dist-info", site / "databricks" / name
        for folder in (info, package / "tests", package / "__pycache__"):
            folder.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-zoo\nVersion: 1.0\n")
        files = [package / "code.py", package / "code.pyi", package / "tests" / "test_code.py"]
        for file in files:
            file.touch()
        (package / "__pycache__" / "code.cpython-311.pyc").touch()
        files += [info / "METADATA", info / "RECORD"]
        (info / "RECORD").write_text("".join(f"{file.relative_to(site)},,\n" for file in files))
    monkeypatch.syspath_prepend(site)
    return site


def test_slim_removes_a_distribution_and_nothing_of_its_neighbour(slim, site):
    slim["prune"](site)
    slim["remove_distribution"](slim["find_distribution"]("one-zoo"))
    assert find_files(site) == [
        "databricks/two/code.py",
        "two_zoo-1.0.dist-info/METADATA",
        "two_zoo-1.0.dist-info/RECORD",
    ]
    slim["remove_distribution"](slim["find_distribution"]("two-zoo"))
    assert [path.name for path in site.iterdir() if path.name == "databricks"], "MLflow looks for something in it"
    assert not list((site / "databricks").iterdir())


def test_slim_says_what_is_not_there_to_be_left_out(slim, site, capsys, tmp_path):
    with pytest.raises(PackageNotFoundError):
        slim["find_distribution"]("pip-that-nobody-installed")
    assert slim["main"]([str(tmp_path), "one-zo"], site) == 2
    assert capsys.readouterr().err.endswith("one-zo: to be left out, but not installed; did you mean one-zoo?\n")
    assert len(find_files(site)) == 12


def test_slim_fails_where_something_is_missing_that_is_no_part_of_torch(slim, tmp_path, monkeypatch):
    package = tmp_path / "endpoint"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "eager.py").write_text("import torch.no_such")  # not for that image
    (package / "app.py").write_text("import no_such_stack")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_stack"):
        slim["load_endpoint"]("endpoint")


def test_bytecode_is_found_below_the_prefix_and_believed(tmp_path):
    (tmp_path / "zoo_module.py").write_text("answer = 42")
    slim, prefix = ROOT / "deploy" / "serve" / "slim.py", tmp_path / "bytecode"
    call = f"runpy.run_path({str(slim)!r})['compile_loaded'](pathlib.Path({str(prefix)!r}))"
    made = f"import runpy, zoo_module, pathlib; {call}"
    environ = {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([sys.executable, "-c", made], env=environ, check=True)
    assert not (tmp_path / "__pycache__").exists()
    (tmp_path / "zoo_module.py").write_text("answer = 43")  # never read again: an image does not change
    used = [sys.executable, "-c", "import zoo_module; print(zoo_module.answer)"]
    environ["PYTHONPYCACHEPREFIX"] = str(prefix)
    assert subprocess.run(used, env=environ, capture_output=True, text=True, check=True).stdout == "42\n"


@pytest.fixture
def prove() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "deploy" / "serve" / "prove.py"))


def test_a_bundle_is_proven_before_it_is_baked_in(prove, bundle, capsys):  # noqa: F811
    assert prove["main"]("bundles/mine", bundle) == 0
    said = capsys.readouterr().out
    assert said == "MODEL=bundles/mine: vit_tiny_patch16_224, 3 classes, answers as saved under eager\n"


def test_a_damaged_bundle_is_one_line_with_its_name(prove, bundle, tmp_path, capsys):  # noqa: F811
    copy = shutil.copytree(bundle, tmp_path / "copy")
    content = bytearray((copy / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (copy / "model.safetensors").write_bytes(content)
    assert prove["main"]("bundles/mine", copy) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: MODEL=bundles/mine: ")
    assert "model.safetensors: damaged" in line


def test_an_engine_that_is_not_there_names_the_image_that_has_it(prove, bundle, monkeypatch, capsys):  # noqa: F811
    for name in [name for name in sys.modules if name.startswith("serve.engines.eager")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert isinstance(prove["Predictor"], type(Predictor))
    assert prove["main"]("bundles/mine", bundle) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the engine eager takes the package torch, which is not installed here" in line
    assert "serve-torch" in line
    assert "python -m serve.equip" in line


@pytest.mark.slow
def test_a_database_instead_of_a_tracking_server_is_one_line(tmp_path):
    (tmp_path / "sqlalchemy.py").write_text("raise ModuleNotFoundError('not in the image', name='sqlalchemy')")
    (tmp_path / "mlflow.db").touch()
    environ = os.environ | {
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "SERVE_PORT": "0",
    }
    command = [sys.executable, "-m", "serve", "models:/digits@champion"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "takes the package sqlalchemy, which is not installed here; MLFLOW_TRACKING_URI may name a server" in line
