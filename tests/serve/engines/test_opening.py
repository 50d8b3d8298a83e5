import os
from importlib import import_module
from pathlib import Path

import pytest

from serve.engines import opening
from serve.engines.eager import EagerEngine
from serve.engines.opening import choose_engine, let_threads_sleep, open_engine
from serve.errors import EngineError
from zoo.card import EngineChoice, ModelCard
from zoo.files.golden import read_bundle_card


@pytest.fixture
def card(bundle: Path) -> ModelCard:
    return read_bundle_card(bundle)


def test_the_cards_engine_is_opened_and_its_difference_told(bundle: Path, card: ModelCard) -> None:
    engine, difference = open_engine(bundle, card)
    assert isinstance(engine, EagerEngine)
    assert engine.choice == EngineChoice(name="eager", precision="fp32")
    assert 0 <= difference < 1e-5


def test_another_engine_than_the_cards_can_be_asked_for(bundle: Path, card: ModelCard) -> None:
    engine, _ = open_engine(bundle, card, choice=EngineChoice(precision="bf16"))
    assert engine.choice.precision == "bf16"


@pytest.mark.parametrize(("name", "package"), [("onnx", "onnxruntime"), ("eager", "torch"), ("compile", "torch")])
def test_an_engine_that_is_not_installed_names_its_package(
    bundle: Path, card: ModelCard, monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    def refuse(_module: str) -> None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    monkeypatch.setattr(opening, "import_module", refuse)
    with pytest.raises(EngineError, match=f"the engine {name} takes the package {package}, which is not installed"):
        open_engine(bundle, card, choice=EngineChoice(name=name))


def test_a_module_of_ours_that_is_missing_is_our_own_fault(
    bundle: Path, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "import_module", lambda _name: import_module("serve.engines.nowhere"))
    with pytest.raises(ModuleNotFoundError, match=r"serve\.engines\.nowhere"):
        open_engine(bundle, card)


def test_threads_of_torch_are_told_to_sleep_before_it_loads_and_a_user_is_heeded(
    bundle: Path, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "")  # to be set back afterwards
    monkeypatch.delenv("OMP_WAIT_POLICY")
    open_engine(bundle, card)
    assert "OMP_WAIT_POLICY" not in os.environ, "torch is loaded: it would not be read, but by processes started here"
    let_threads_sleep(["json"])
    assert os.environ["OMP_WAIT_POLICY"] == "passive"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    let_threads_sleep([])
    assert os.environ["OMP_WAIT_POLICY"] == "active"


def test_a_setting_replaces_what_the_card_names(card: ModelCard) -> None:
    card = card.model_copy(update={"engine": EngineChoice(name="compile", precision="bf16")})
    assert choose_engine(card) == card.engine
    assert choose_engine(card, "eager") == EngineChoice(name="eager", precision="bf16")
    assert choose_engine(card, precision="fp32") == EngineChoice(name="compile", precision="fp32")
