import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import zoo
from zoo import entry_points, plugins, registry
from zoo.errors import PluginError, PluginWarning, UnknownNameError

pytestmark = pytest.mark.usefixtures("own_registry")
CLASS = """
from zoo.projections import SeparateProjection

class Mine(SeparateProjection):
    pass
"""
DECORATED = """
import zoo
from zoo.projections import SeparateProjection

@zoo.register_attention("decorated")
class Mine(SeparateProjection):
    pass
"""

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a package with one module and its entry points, as pip would, in a folder of its own."""
    monkeypatch.setattr(plugins, "_LOADED", [])
    monkeypatch.setattr(entry_points, "_SEEN", set())
    modules = set(sys.modules)

    def install_(name: str, text: str, *entries: str, version: str = "1.2") -> Path:
        site = tmp_path / name
        info = site / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text("\n".join(["[zoo.attentions]", *entries, ""]))
        file = site / f"{name}_module.py"
        file.write_text(text)
        monkeypatch.syspath_prepend(site)
        return file

    yield install_
    for name in set(sys.modules) - modules:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def test_a_class_is_found_when_its_name_is_asked_for_and_not_before(install: Install) -> None:
    file = install("acme", CLASS, "mine = acme_module:Mine")
    registry.find_attention("separate")
    assert "acme_module" not in sys.modules
    model = zoo.create_model(
        "vit_tiny_patch16_224", "mine", img_size=32, patch_size=8, embed_dim=32, depth=1, num_heads=2
    )
    assert type(model.get_submodule("blocks.0.attn.qkv")).__name__ == "Mine"
    (source,) = zoo.plugin_sources("mine")
    assert (source.name, source.distribution, source.version) == ("acme_module", "acme", "1.2")
    plugin = plugins.find_plugin("mine")
    assert plugin is not None
    assert plugin.file == file


def test_a_module_registers_by_itself_and_is_found_by_its_variants_name(install: Install) -> None:
    install("acme", DECORATED, "anything = acme_module")
    assert registry.find_attention("decorated").__name__ == "Mine"
    assert zoo.plugin_sources("decorated")[0].distribution == "acme"


def test_a_decorated_class_may_have_an_entry_point_too(install: Install) -> None:
    install("acme", DECORATED, "decorated = acme_module:Mine")
    assert registry.find_attention("decorated").__name__ == "Mine"
    assert zoo.plugin_sources("decorated")[0].version == "1.2"


def test_listing_finds_all_and_says_once_what_is_broken(install: Install) -> None:
    install("good", CLASS, "mine = good_module:Mine")
    install("bad", "import nowhere_at_all", "worse = bad_module:Worse")
    install("silent", "x = 1", "nothing = silent_module")
    install("greedy", CLASS, "linear = greedy_module:Mine")
    install("typo", CLASS, "typo = typo_module:Mien")
    install("absent", CLASS, "absent = no_such_module:Mine")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        names = zoo.list_attentions()
        again = zoo.list_attentions()
    assert names == again == ("linear", "mine", "parameter", "separate")
    assert {warning.category for warning in caught} == {PluginWarning}
    said = [str(warning.message) for warning in caught]
    assert len(said) == 5
    for wanted in (
        r"bad_module:Worse of the package bad 1\.2, line 1: ModuleNotFoundError: No module named 'nowhere_at_all'",
        r"silent_module of the package silent 1\.2: registers no attention; decorate a class",
        r"greedy_module:Mine of the package greedy 1\.2: attention 'linear' is already LinearProjection, built in",
        r"typo_module:Mien of the package typo 1\.2: AttributeError: module 'typo_module' has no attribute 'Mien'",
        r"no_such_module:Mine of the package absent 1\.2: ModuleNotFoundError: No module named 'no_such_module'",
    ):
        assert [message for message in said if re.search(wanted, message)], (wanted, said)


def test_a_broken_package_is_an_error_for_who_asks_for_its_variant_alone(install: Install) -> None:
    install("good", CLASS, "mine = good_module:Mine")
    install("bad", "import nowhere_at_all", "worse = bad_module:Worse", "module = bad_module")
    registry.find_attention("mine")
    before = registry.registered()
    with pytest.raises(PluginError, match=r"bad_module:Worse of the package bad 1\.2, line 1: ModuleNotFoundError"):
        registry.find_attention("worse")
    with pytest.raises(UnknownNameError, match=r"'wors', did you mean 'worse'\?; plugin bad_module of the package bad"):
        registry.find_attention("wors")
    assert registry.registered() == before


def test_two_packages_with_one_name_are_both_named(install: Install) -> None:
    install("acme", CLASS, "mine = acme_module:Mine")
    install("bolt", CLASS, "mine = bolt_module:Mine")
    with pytest.raises(PluginError, match=r"'mine' is offered by acme 1\.2 and bolt 1\.2: uninstall all but one"):
        registry.find_attention("mine")
    with pytest.warns(PluginWarning, match="'mine' is offered by"):
        assert zoo.list_attentions() == ("linear", "parameter", "separate")


def test_half_of_a_failing_module_is_undone(install: Install) -> None:
    install("acme", f"{DECORATED}\nraise RuntimeError('planted')", "half = acme_module")
    with pytest.raises(UnknownNameError, match=r"'decorated'.*acme 1\.2, line 9: RuntimeError: planted"):
        registry.find_attention("decorated")
    assert "decorated" not in registry.registered()


@pytest.mark.slow
def test_a_fresh_process_builds_the_variant_of_an_installed_package(install: Install, monkeypatch: Any) -> None:
    file = install("acme", CLASS, "mine = acme_module:Mine")
    monkeypatch.setenv("PYTHONPATH", str(file.parent))
    code = (
        "import zoo; m = zoo.create_model('vit_tiny_patch16_224', 'mine', depth=1); print(type(m.blocks[0].attn.qkv))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "<class 'acme_module.Mine'>\n"
