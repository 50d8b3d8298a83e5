"""The suite for a variant: the built-in ones and a whole module pass it, and its flags do what they say."""

import subprocess
import sys
from pathlib import Path
from typing import ClassVar
from unittest import SkipTest

import pytest

import zoo
from tests.zoo.suites import Broken, Cosine, Temperature, suite
from zoo.errors import PluginError
from zoo.testing import VariantSuite
from zoo.trial import PLAIN

OWN = pytest.mark.usefixtures("own_registry")


class TestLinear(VariantSuite):
    attention = "linear"


class TestSeparate(VariantSuite):
    attention = "separate"


class TestParameter(VariantSuite):
    attention = "parameter"


@pytest.fixture
def temperature(own_registry: None) -> None:  # noqa: ARG001
    zoo.register_attention("temperature")(Temperature)


@pytest.mark.usefixtures("temperature")
class TestWholeModule(VariantSuite):
    attention = "temperature"
    backbones = PLAIN
    restores = False


@pytest.fixture
def cosine(own_registry: None) -> None:  # noqa: ARG001
    zoo.register_attention("cosine")(Cosine)


@pytest.mark.usefixtures("cosine")
class TestAnotherFunction(VariantSuite):
    attention = "cosine"
    backbones = PLAIN
    same_function = False


@pytest.mark.slow
class TestInOneGraph(VariantSuite):
    attention = "parameter"
    backbones = PLAIN
    exports = compiles = True


@OWN
def test_what_can_be_restored_says_so() -> None:
    with pytest.raises(AssertionError, match="it can be restored: set restores = True"):
        suite(Broken, restores=False).test_restore_gives_timms_state_dict_back()


@OWN
def test_a_flag_that_is_off_skips_and_says_which() -> None:
    with pytest.raises(SkipTest, match="exports = False"):
        suite(Broken).test_it_exports()


@OWN
@pytest.mark.parametrize("test", ["test_a_swap_keeps_the_logits", "test_a_swap_keeps_a_training_step"])
def test_another_function_is_compared_with_timms_only_where_it_claims_to_be_the_same(test: str) -> None:
    with pytest.raises(AssertionError, match=r"logits in .* mode: differ by up to"):
        getattr(suite(Cosine), test)()
    with pytest.raises(SkipTest, match="same_function = False"):
        getattr(suite(None, same_function=False), test)()


@OWN
def test_a_suite_without_a_name_says_what_it_wants() -> None:
    class TestNothing(VariantSuite):
        pass

    with pytest.raises(AssertionError, match="TestNothing wants the variant's name: attention = 'mine'"):
        TestNothing().test_it_is_registered()


@OWN
def test_the_suite_loads_its_plugins(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"plugin my_attention\.py: no such file"):
        suite(None, plugins="my_attention.py").test_it_is_registered()
    file = tmp_path / "my_attention.py"
    file.write_text(
        "import zoo\nfrom zoo.projections import SeparateProjection\n"
        "class Mine(SeparateProjection): pass\nzoo.register_attention('mine')(Mine)\n"
    )
    suite(None, plugins=file).test_it_is_registered()
    suite(None, plugins=(file,)).test_a_bundle_brings_it_back()


@pytest.mark.slow
def test_a_users_test_file_is_collected_by_pytest_and_the_suite_needs_none(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "from zoo.testing import VariantSuite\n\nclass TestMine(VariantSuite):\n    attention = 'separate'\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "13 passed, 2 skipped" in done.stdout, done.stdout
    code = "import sys, zoo.testing; assert 'pytest' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


class TestNames:
    """Names of the suite's tests, as a contract with those who deselect one."""

    names: ClassVar = [name for name in vars(VariantSuite) if name.startswith("test_")]

    def test_every_test_explains_itself(self) -> None:
        assert len(self.names) == 15
        assert all(getattr(VariantSuite, name).__doc__ for name in self.names)
