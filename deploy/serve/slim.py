"""Make the `serve` image's environment small: its Dockerfile runs this once, with that environment's own python.

    python slim.py BYTECODE [DISTRIBUTION ...]

Removes the distributions (whose names are pip's), tests, type stubs, bytecode and what is `DEAD` in packages. Then
imports the whole endpoint, which proves that nothing it needs is gone, and writes the bytecode of exactly the modules
that this loaded below BYTECODE (a PYTHONPYCACHEPREFIX): a root filesystem that is read-only could keep none, and
bytecode of everything would be four times as large.
"""

import pkgutil
import py_compile
import shutil
import sys
import sysconfig
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from importlib.util import cache_from_source
from pathlib import Path

KEPT_FOLDERS = ("databricks",)
"""MLflow looks for databricks.agents as it is imported, which fails unless there is a `databricks`, be it empty."""
DEAD = (
    "PIL/_avif.*",  # a format that zoo.preprocess does not take
    "pillow.libs/libavif*",
    "onnxruntime/capi/libonnxruntime.so.*",  # for C programs: Python's module holds the same once more
    "onnxruntime/quantization",  # these take the package onnx
    "onnxruntime/tools",
    "onnxruntime/transformers",
)
"""What nothing here calls, as patterns."""
ABSENT = {"accelerate", "einops", "httpx", "onnx", "pandas", "timm", "torch", "torchvision", "tqdm"}
"""What a module of serve may want and this image has not: such a module is not for it."""
NEEDED = (
    "serve.__main__",
    "serve.engines.onnx_runtime",
    "serve.models.registry",
    "encodings.idna",
    "mlflow.store.artifact.mlflow_artifacts_repo",
    "mlflow.store.tracking.rest_store",
    "uvicorn.lifespan.on",
    "uvicorn.loops.uvloop",
    "uvicorn.protocols.http.httptools_impl",
)
"""What must be here, and of that what is imported only while it starts or fetches a model."""


def main(argv: list[str], site: Path) -> int:
    """Do it to the site-packages `site`; return the exit status."""
    bytecode, *names = argv
    before = measure(site)
    try:
        found = [find_distribution(name) for name in names]
    except PackageNotFoundError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    prune(site)
    for each in found:
        remove_distribution(each)
    load_endpoint("serve")
    compiled = compile_loaded(Path(bytecode))
    sizes = f"{before:.0f} MB are {measure(site):.0f}, and {measure(Path(bytecode)):.0f} of bytecode"
    sys.stdout.write(f"slim: {sizes} of {compiled} modules\n")
    return 0


def find_distribution(name: str) -> Distribution:
    """Return what is installed as `name`.

    Raises:
        PackageNotFoundError: If nothing is; the message names the nearest.
    """
    try:
        return distribution(name)
    except PackageNotFoundError as error:
        near = get_close_matches(name, [each.name for each in distributions()], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise PackageNotFoundError(f"{name}: to be left out, but not installed{hint}") from error


def remove_distribution(found: Distribution) -> None:
    """Delete the files of a distribution, and the folders that are empty then: one left would still be a package."""
    files = [Path(str(found.locate_file(file))).resolve() for file in found.files or ()]
    for file in files:
        file.unlink(missing_ok=True)
    for folder in sorted({parent for file in files for parent in file.parents}, key=lambda path: -len(path.parts)):
        if folder.name not in KEPT_FOLDERS and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def prune(site: Path) -> None:
    """Delete tests, bytecode, type stubs and `DEAD` below `site`."""
    folders = [path for path in site.rglob("*") if path.is_dir() and path.name in ("__pycache__", "test", "tests")]
    dead = [found for pattern in DEAD for found in site.glob(pattern)]
    for path in (*folders, *dead, *site.rglob("*.pyi")):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def load_endpoint(package: str) -> None:
    """Import every module of `package` that is for this image, and all that is `NEEDED`.

    Raises:
        ImportError: If something of that is missing, or something else than `ABSENT`.
    """
    names = [
        package,
        *(module.name for module in pkgutil.walk_packages(import_module(package).__path__, f"{package}.")),
    ]
    for name in names:
        if name.endswith(".__main__"):
            continue  # a command, which says itself what it takes; the image's own is `NEEDED`
        try:
            import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in ABSENT:
                raise
    for name in NEEDED:
        import_module(name)
    import_module("PIL.Image").init()  # its formats


def compile_loaded(into: Path) -> int:
    """Write the bytecode of all that is loaded, never to be compared with its source again; return how many files."""
    loaded = [module for name, module in list(sys.modules.items()) if name != "__main__"]
    files = {Path(file) for module in loaded if (file := getattr(module, "__file__", None))}
    sources = {file for file in files if file.suffix == ".py" and file.is_file()}  # setuptools is loaded, and gone
    sys.pycache_prefix = str(into)
    for source in sorted(sources):
        py_compile.compile(
            str(source),
            cfile=cache_from_source(str(source)),
            doraise=True,
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )
    return len(sources)


def measure(folder: Path) -> float:
    """Return the size of a folder's files in MB."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path(sysconfig.get_path("purelib"))))
