import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import zoo
from zoo.errors import PluginError, UnknownNameError
from zoo.registry import describe_holder, find_attention, registered, undone_on_error

ROOT = Path(__file__).parents[2]


@pytest.mark.usefixtures("own_registry")
def test_a_registered_class_is_found_under_its_name() -> None:
    @zoo.register_attention("mine")
    class Mine(nn.Module):
        pass

    assert find_attention("mine") is Mine
    assert zoo.list_attentions() == ("linear", "mine", "parameter", "separate")


def test_the_fixture_took_the_test_variant_away() -> None:
    assert zoo.list_attentions() == ("linear", "parameter", "separate")


@pytest.mark.usefixtures("own_registry")
def test_a_name_is_given_once_and_the_holder_is_named() -> None:
    before = find_attention("separate")
    with pytest.raises(PluginError, match="attention 'separate' is already SeparateProjection, built in; choose"):
        zoo.register_attention("separate")(nn.Identity)
    assert find_attention("separate") is before
    zoo.register_attention("mine")(type("Mine", (nn.Identity,), {"__module__": __name__}))
    assert describe_holder("mine").startswith("Mine, of ")
    with pytest.raises(PluginError, match=r"attention 'mine' is already Mine, of .*test_registry\.py"):
        zoo.register_attention("mine")(nn.Identity)
    with pytest.raises(PluginError, match="attention 'timm' is already timm's own attention"):
        zoo.register_attention("timm")(nn.Identity)


@pytest.mark.parametrize("name", ["", "two words", "a/b", "a:b", "a\n"])
def test_a_name_that_no_command_line_takes_is_refused(name: str) -> None:
    with pytest.raises(PluginError, match=r"attention name .*: wanted are letters"):
        zoo.register_attention(name)


def test_what_is_no_module_class_is_refused() -> None:
    with pytest.raises(PluginError, match=r"'mine': wanted is a class derived from torch's nn\.Module, got <class 'in"):
        zoo.register_attention("mine")(int)  # type: ignore[type-var]
    with pytest.raises(PluginError, match=r"'mine': wanted is a class .*, got Linear\("):
        zoo.register_attention("mine")(nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(PluginError, match=r'wants a name first: @zoo\.register_attention\("my_name"\), got <class'):
        zoo.register_attention(nn.Linear)  # type: ignore[arg-type]
    assert "mine" not in registered()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("seperate", "unknown attention 'seperate', did you mean 'separate'"),
        ("xyz", "unknown attention 'xyz'; known are linear, parameter, separate"),
    ],
)
def test_an_unknown_name_gives_the_nearest_or_all(name: str, message: str) -> None:
    with pytest.raises(UnknownNameError, match=message):
        find_attention(name)


@pytest.mark.usefixtures("own_registry")
def test_a_block_that_fails_leaves_the_registry_as_it_was() -> None:
    before = registered()

    def fail() -> None:
        with undone_on_error():
            zoo.register_attention("mine")(nn.Identity)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert registered() == before


@pytest.mark.slow
@pytest.mark.parametrize("use", ["find_attention('separate')", "register_attention('separate')(torch.nn.Identity)"])
def test_the_built_in_variants_are_first_whatever_is_imported_first(use: str) -> None:
    code = f"import torch\nfrom zoo.registry import *\ntry: {use}\nexcept ValueError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    told = "attention 'separate' is already SeparateProjection, built in; choose another name\n"
    assert done.stdout == (told if use.startswith("register") else "")


FAIL = """
import sys
from zoo.plugins import load_plugins
assert load_plugins([]) == () and "torch" not in sys.modules
try:
    load_plugins(sys.argv[1])
except ValueError as error:
    print(type(error).__name__, "zoo.projections" in sys.modules)
import zoo
print(*zoo.list_attentions())
"""


@pytest.mark.slow
def test_a_plugin_that_fails_first_in_a_process_takes_no_built_in_variant_along(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import zoo.projections\n1 / 0\n")
    command = [sys.executable, "-c", FAIL, str(tmp_path / "mine.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["PluginError True", "linear parameter separate"], done.stderr
