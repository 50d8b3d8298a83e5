"""Who may import whom, and how files are named and sized: held for whatever modules exist."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("zoo", "serve", "train")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
NO_TORCH = ("zoo", "zoo.card", "zoo.errors", "zoo.preprocess")  # heavy ones load on first use
FORBIDDEN = {
    "zoo": ("accelerate", "mlflow", "fastapi", "uvicorn", "train", "serve"),
    "serve": ("accelerate", "train"),
    "train": ("fastapi", "uvicorn"),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules_of(package: str) -> list[str]:
    names = [module_name(path) for path in FILES]
    return [name for name in names if name.split(".")[0] == package and not name.endswith("__main__")]


def loaded_after(names: list[str]) -> set[str]:
    """Import the modules in a fresh process and return the top-level names that were loaded."""
    code = (
        "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\nprint('\\n'.join(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, *names], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in done.stdout.split()}


def imported_names(tree: ast.AST) -> set[str]:
    """Return every dotted name that a file imports, at its top or within a function."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def foreign_imports(package: str, source: str) -> list[str]:
    """Return the imports in a file of `package` that cross a border they may not cross."""
    allowed = {"zoo": (), "serve": ("zoo",), "train": ("zoo", "serve.package")}[package]
    return sorted(
        name
        for name in imported_names(ast.parse(source))
        if name.split(".")[0] in PACKAGES and name.split(".")[0] != package
        if not any(name == right or name.startswith(f"{right}.") for right in allowed)
    )


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_loads_nothing_from_above_it(package: str) -> None:
    names = modules_of(package)
    if names == [package]:
        pytest.skip(f"{package} has no modules yet")
    assert loaded_after(names) & set(FORBIDDEN[package]) == set()


@pytest.mark.parametrize("name", NO_TORCH)
def test_what_needs_no_torch_loads_none(name: str) -> None:
    assert loaded_after([name]) & {"torch", "timm", "torchvision", "safetensors"} == set()


@pytest.mark.parametrize("name", ["zoo.files.golden", "zoo.files.onnx_file", "zoo.plugins", "zoo.plugin_check"])
def test_what_a_server_without_torch_needs_loads_none(name: str) -> None:
    assert loaded_after([name]) & {"torch", "timm", "torchvision", "mlflow", "onnx", "onnxruntime"} == set()


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_a_file_imports_only_from_below(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    assert foreign_imports(package, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("package", "source", "found"),
    [
        ("zoo", "def f():\n    from serve.app import create_app", ["serve.app.create_app"]),
        ("zoo", "import train", ["train"]),
        ("serve", "from train import config", ["train.config"]),
        ("serve", "import zoo\nfrom zoo.card import ModelCard\nimport trainer", []),
        ("train", "from serve.protocol.payload import read", ["serve.protocol.payload.read"]),
        ("train", "from serve import package\nfrom serve.package import log_bundle\nimport serve.package", []),
        ("train", "import serve", ["serve"]),
    ],
)
def test_the_scan_sees_a_planted_import(package: str, source: str, found: list[str]) -> None:
    assert foreign_imports(package, source) == found


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_a_file_is_one_idea_with_a_name_of_its_own(path: Path) -> None:
    if path.stem not in ("__init__", "__main__"):
        assert path.stem not in sys.stdlib_module_names
        assert path.stem not in ("utils", "util", "common", "helpers", "helper", "misc")
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 300


def test_no_module_hides_a_public_function() -> None:
    import zoo

    assert set(zoo.__all__) & {path.stem for path in (ROOT / "zoo").glob("*.py")} == set()


def test_every_public_name_is_there() -> None:
    import zoo

    missing = [name for name in zoo.__all__ if getattr(zoo, name, None) is None]
    assert missing == []
    with pytest.raises(AttributeError, match="module 'zoo' has no attribute 'swap_atention'"):
        _ = zoo.swap_atention


def test_tests_are_no_packages() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []
