import builtins
import copy
import inspect
import json
import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zoo
from zoo import plugins, registry
from zoo.errors import PluginError
from zoo.plugin_files import is_file_module
from zoo.plugins import find_plugin

BACKBONE = "vit_tiny_patch16_224"
HEAD = "import zoo\nfrom zoo.projections import SeparateProjection\n\n"
MINE = f"""{HEAD}
@zoo.register_attention("mine")
class Mine(SeparateProjection):
    def double(self, x):
        return 2 * x
"""
OTHER = MINE.replace("mine", "other").replace("Mine", "Other")

Write = Callable[..., Path]


pytestmark = pytest.mark.usefixtures("own_registry", "clean")


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A process that has loaded no plugin, in an empty current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plugins, "_LOADED", [])
    monkeypatch.setenv("ZOO_PLUGIN_FILES", "[]")
    modules = set(sys.modules)
    yield
    for name in set(sys.modules) - modules:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if is_file_module(name) or file.startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a file below the current directory."""

    def write_(name: str, text: str = MINE) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write_


def state() -> tuple[Any, ...]:
    """What must be as before after an error."""
    return registry.registered(), list(plugins._LOADED), {name for name in sys.modules if is_file_module(name)}


def test_a_file_registers_its_variant_and_the_swap_takes_it(write: Write) -> None:
    path = write("my_attention.py")
    (plugin,) = zoo.load_plugins("my_attention.py")
    assert (plugin.attentions, plugin.file, plugin.source.name) == (("mine",), path, "my_attention.py")
    model = zoo.create_model(BACKBONE, "mine", img_size=32, patch_size=8, embed_dim=32, depth=1, num_heads=2)
    assert isinstance(model.get_submodule("blocks.0.attn.qkv"), registry.find_attention("mine"))
    assert zoo.plugin_sources("mine") == (plugin.source,)
    assert zoo.plugin_sources("separate") == ()


def test_the_hash_is_that_of_the_file(write: Write) -> None:
    write("my_attention.py")
    (plugin,) = zoo.load_plugins("my_attention.py")
    told = subprocess.run(["sha256sum", "my_attention.py"], capture_output=True, text=True, check=True).stdout
    assert plugin.source.sha256 == told.split()[0]


def test_the_same_file_is_run_once_by_whatever_path(write: Write, tmp_path: Path, monkeypatch: Any) -> None:
    path = write("folder/my_attention.py", f"import builtins\nbuiltins.runs = getattr(builtins, 'runs', 0) + 1\n{MINE}")
    (tmp_path / "link.py").symlink_to(path)
    write("copy.py", path.read_text())
    monkeypatch.syspath_prepend(tmp_path / "folder")
    ways = ["folder/my_attention.py", path, "folder/../link.py", "copy.py", "my_attention"]
    first, *others = zoo.load_plugins(ways)
    assert others == [first] * 4
    assert zoo.load_plugins(path) == (first,)
    assert vars(builtins).pop("runs") == 1


def test_a_file_that_was_imported_as_a_module_is_not_run_again(write: Write, monkeypatch: Any, tmp_path: Path) -> None:
    write("my_attention.py")
    monkeypatch.syspath_prepend(tmp_path)
    import my_attention  # type: ignore[import-not-found]

    (plugin,) = zoo.load_plugins("my_attention.py")
    assert plugin.attentions == ("mine",)
    assert registry.find_attention("mine") is my_attention.Mine


def test_a_file_that_changed_wants_a_new_process(write: Write) -> None:
    write("my_attention.py")
    zoo.load_plugins("my_attention.py")
    write("my_attention.py", MINE + "# changed\n")
    with pytest.raises(PluginError, match=r"my_attention\.py: has changed since it was loaded; start a new process"):
        zoo.load_plugins("my_attention.py")


def test_two_files_of_one_name_do_not_clash(write: Write) -> None:
    write("a/attention.py")
    write("b/attention.py", OTHER)
    zoo.load_plugins(["a/attention.py", "b/attention.py"])
    assert {"mine", "other"} <= registry.registered().keys()


@pytest.mark.parametrize("name", ["json.py", "torch.py", "zoo.py", "my-attention v1.2.py", "日本語.py", "class.py"])
def test_no_name_of_a_file_hides_a_module(write: Write, name: str) -> None:
    before = sys.modules.get(name.removesuffix(".py"))
    zoo.load_plugins(write(name))
    assert sys.modules.get(name.removesuffix(".py")) is before
    assert find_plugin("mine").source.name == name  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ny = 1 / 0\n", r"plugin bad\.py, line 2: ZeroDivisionError: division by zero"),
        ("x = 1\ndef f(:\n", r"plugin bad\.py, line 2: SyntaxError: invalid syntax"),
        ("import nowhere_at_all\n", r"plugin bad\.py, line 1: ModuleNotFoundError: No module named 'nowhere_at_all'$"),
        ("import near\n", r"plugin bad\.py, line 1: .*'near'; a plugin's neighbours are no modules: set PYTHONPATH=/"),
        ("import sys\n\nsys.exit('usage')\n", r"plugin bad\.py, line 3: SystemExit: usage"),
        ("x = 1\n", r"plugin bad\.py: registers no attention; decorate a class"),
        ("", r"plugin bad\.py: registers no attention"),
        (
            f"{HEAD}zoo.register_attention('linear')(SeparateProjection)",
            r"bad\.py, line 4: attention 'linear' is already LinearProjection, built in; choose another name",
        ),
        (
            f"{OTHER}\nzoo.register_attention('first')(Other)",
            r"bad\.py, line 10: attention 'first' is already First, of /.*/first\.py; choose",
        ),
        (f"{OTHER}\nraise RuntimeError('late\\nand long')", r"plugin bad\.py, line 10: RuntimeError: late$"),
        (f"{OTHER}\ndef f():\n    zoo.register_attention('a b')\nf()", r"bad\.py, line 11: attention name 'a b'"),
        (b"\xff\xfe", r"plugin bad\.py, line 1: SyntaxError"),
    ],
)
def test_a_file_that_fails_is_one_line_and_leaves_nothing(write: Write, text: str | bytes, message: str) -> None:
    zoo.load_plugins(write("first.py", MINE.replace("mine", "first").replace("Mine", "First")))
    write("near.py")
    bad = write("bad.py", "")
    bad.write_bytes(text if isinstance(text, bytes) else text.encode())
    before = state()
    with pytest.raises(PluginError, match=message) as caught:
        zoo.load_plugins(["near.py", "bad.py"])
    assert "\n" not in str(caught.value)
    assert state() == before


def test_a_file_that_failed_can_be_mended_and_loaded(write: Write) -> None:
    bad = write("bad.py", f"{MINE}\nraise RuntimeError('planted')")
    with pytest.raises(PluginError, match="planted"):
        zoo.load_plugins(bad)
    bad.write_text(MINE)
    (plugin,) = zoo.load_plugins(bad)
    assert plugin.attentions == ("mine",)


def test_what_a_failing_file_imported_registers_again_at_the_second_try(write: Write, monkeypatch: Any) -> None:
    write("lib/my_library.py", OTHER)
    bad = write("bad.py", f"import my_library\n{MINE}\nraise RuntimeError('planted')")
    monkeypatch.syspath_prepend(bad.parent / "lib")
    with pytest.raises(PluginError, match="planted"):
        zoo.load_plugins(bad)
    assert not {"mine", "other"} & registry.registered().keys()
    bad.write_text(f"import my_library\n{MINE}")
    assert set(zoo.load_plugins(bad)[0].attentions) == {"mine", "other"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_atention.py", r"plugin my_atention\.py: no such file below /.*, did you mean 'my_attention\.py'\?"),
        (Path("no/where.py"), r"plugin no/where\.py: no such file below"),
        ("folder.py", r"plugin folder\.py: wanted is a Python file"),
        ("notes.txt", r"plugin notes\.txt: wanted is a Python file, whose name ends in \.py"),
        ("./notes.txt", r"plugin notes\.txt: wanted is a Python file"),
        ("two words", "plugin 'two words': no name of a module; a file is given by a path"),
        ("", "plugin '': no name of a module"),
        ("my_attention", r"plugin my_attention: no such module can be imported; .*; did you mean my_attention\.py\?"),
        ("zoo.nowhere.at_all", r"plugin zoo\.nowhere\.at_all: no such module"),
        ("json.decoder.at_all", r"plugin json\.decoder\.at_all: no such module"),
        ("json", "plugin json: registers no attention"),
    ],
)
def test_what_is_no_plugin_is_named(write: Write, tmp_path: Path, name: str | Path, message: str) -> None:
    write("my_attention.py")
    write("notes.txt")
    (tmp_path / "folder.py").mkdir()
    before = state()
    with pytest.raises(PluginError, match=message) as caught:
        zoo.load_plugins(name)
    assert "\n" not in str(caught.value)
    assert state() == before


@pytest.mark.parametrize("imported", [False, True])
def test_a_module_registers_by_its_name(write: Write, monkeypatch: Any, tmp_path: Path, imported: bool) -> None:
    write("my_package/__init__.py", "")
    file = write("my_package/attention.py")
    monkeypatch.syspath_prepend(tmp_path)
    if imported:
        __import__("my_package.attention")
    (plugin,) = zoo.load_plugins("my_package.attention")
    assert (plugin.source.name, plugin.file, plugin.attentions) == ("my_package.attention", file, ("mine",))
    assert plugin.source.sha256


def test_a_module_that_fails_names_the_line(write: Write, monkeypatch: Any, tmp_path: Path) -> None:
    write("my_module.py", f"{MINE}\nimport my_broken\n")
    write("my_broken.py", "\n\nraise RuntimeError('planted')\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = state()
    with pytest.raises(PluginError, match=r"plugin my_module, line 10: RuntimeError: planted"):
        zoo.load_plugins("my_module")
    with pytest.raises(PluginError, match=r"plugin my_broken\.x, /.*/my_broken\.py line 3: RuntimeError: planted"):
        zoo.load_plugins("my_broken.x")
    assert state() == before


def test_a_class_registered_by_hand_has_the_file_it_is_written_in() -> None:
    class Here(nn.Identity):
        pass

    zoo.register_attention("here")(Here)
    plugin = find_plugin("here")
    assert plugin is not None
    assert (plugin.source.name, plugin.file) == (__name__, Path(__file__).resolve())


def test_a_file_is_a_module_like_any_other(write: Write) -> None:
    options = "\n\n@dataclass\nclass Options:\n    a: int\n"
    path = write("my_attention.py", f"from dataclasses import dataclass\n{MINE}{options}")
    zoo.load_plugins(path)
    cls: Any = registry.find_attention("mine")
    assert inspect.getsource(cls).startswith('@zoo.register_attention("mine")\nclass Mine')
    assert inspect.getsourcefile(cls) == str(path)
    module = sys.modules[cls.__module__]
    assert copy.deepcopy(module.Options(3)) == module.Options(3)
    assert copy.deepcopy(cls) is cls
    with pytest.raises(TypeError) as caught:
        cls.double(None, None)
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.filename, last.line) == (str(path), "return 2 * x")
    assert list(path.parent.glob("**/__pycache__")) == []


@pytest.mark.slow
def test_a_spawned_process_finds_the_classes_of_a_file(write: Write) -> None:
    zoo.load_plugins(write("my_attention.py"))
    cls: Any = registry.find_attention("mine")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(cls.double, (None, 21)) == 42
        assert pool.apply(zoo.list_attentions) == ("linear", "mine", "parameter", "separate")


@pytest.mark.slow
def test_the_environment_alone_runs_nothing(write: Write) -> None:
    path = write("my_attention.py", f"{MINE}\nprint('ran')\n")
    env = os.environ | {"ZOO_PLUGIN_FILES": json.dumps([str(path)])}
    code = "import zoo; print(zoo.list_attentions())"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "('linear', 'parameter', 'separate')"


def test_a_copy_that_is_compiled_elsewhere_is_not_run_for_the_file(write: Write) -> None:
    """Another file of the same length and time as the one that a .pyc was made of."""
    path = write("my_attention.py")
    sys.dont_write_bytecode, kept = False, sys.dont_write_bytecode
    try:
        times = path.stat()
        subprocess.run([sys.executable, "-m", "compileall", "-q", "my_attention.py"], check=True)
        path.write_text(MINE.replace("2 * x", "3 * x"))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        zoo.load_plugins(path)
    finally:
        sys.dont_write_bytecode = kept
    cls: Any = registry.find_attention("mine")
    assert cls.double(None, torch.tensor(1)) == 3
