import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import zoo
from zoo import plugins, registry
from zoo.bundle import check_golden, load_bundle
from zoo.card import ModelCard, PluginSource, Preprocessing
from zoo.errors import BundleError, MissingPluginError, PluginWarning

pytestmark = pytest.mark.usefixtures("own_registry")
KWARGS = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2}
MINE = """
import zoo
from zoo.projections import SeparateProjection

@zoo.register_attention("mine")
class Mine(SeparateProjection):
    pass
"""

Save = Callable[..., Path]


def forget() -> None:
    """Leave the process as if it had loaded no plugin."""
    registry._ATTENTIONS.pop("mine", None)
    plugins._LOADED.clear()


@pytest.fixture
def save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Save:
    """Save a bundle of the variant `mine` of the file my_attention.py, and forget the file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plugins, "_LOADED", [])

    def save_(**changes: object) -> Path:
        (tmp_path / "my_attention.py").write_text(MINE)
        zoo.load_plugins("my_attention.py")
        card = ModelCard(
            backbone="vit_tiny_patch16_224",
            timm_kwargs=dict(KWARGS),
            attention="mine",
            plugins=zoo.plugin_sources("mine"),
            class_names=("ash", "elm"),
            preprocessing=Preprocessing(size=(32, 32), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)),
        ).model_copy(update=changes)
        model = zoo.create_model("vit_tiny_patch16_224", "mine", seed=0, num_classes=2, **KWARGS)
        zoo.save_bundle(model, card, tmp_path / "bundle")
        forget()
        return tmp_path / "bundle"

    return save_


def test_a_bundle_says_which_file_to_give_and_how_and_loads_with_it(save: Save) -> None:
    bundle = save()
    digest = re.search(r'"sha256": "(\w{64})"', (bundle / "card.json").read_text())
    assert digest
    with pytest.raises(MissingPluginError) as caught:
        load_bundle(bundle)
    assert str(caught.value) == (
        f"{bundle}/card.json: attention 'mine' is not registered here: it needs the file my_attention.py (SHA-256 "
        f"{digest[1][:12]}...), whose code no bundle holds: give it by --plugins my_attention.py or "
        "SERVE_PLUGINS=my_attention.py, in Python by zoo.load_plugins('my_attention.py')"
    )
    zoo.load_plugins("my_attention.py")
    model, _ = load_bundle(bundle)
    assert check_golden(model, bundle) == 0
    assert type(model.get_submodule("blocks.0.attn.qkv")).__name__ == "Mine"


def test_no_code_is_in_a_bundle(save: Save) -> None:
    bundle = save()
    assert {file.name for file in bundle.iterdir()} == {"card.json", "model.safetensors", "golden.safetensors"}
    assert not [file for file in bundle.iterdir() if b"SeparateProjection" in file.read_bytes()]


def test_other_code_is_warned_of_and_its_answer_is_checked(save: Save, tmp_path: Path) -> None:
    bundle = save()
    (tmp_path / "newer.py").write_text(f"{MINE}# only a comment\n")
    zoo.load_plugins("newer.py")
    with pytest.warns(PluginWarning, match=r"'mine' was trained with my_attention\.py \(SHA-256 .*that of newer\.py"):
        model, _ = load_bundle(bundle)
    assert check_golden(model, bundle) == 0
    forget()
    (tmp_path / "wrong.py").write_text(
        MINE.replace("pass", "forward = lambda self, x: 1 + super(Mine, self).forward(x)")
    )
    zoo.load_plugins("wrong.py")
    with pytest.warns(PluginWarning, match=r"that of wrong\.py"):
        model, _ = load_bundle(bundle)
    with pytest.raises(BundleError, match="not the same weights, or not the same model"):
        check_golden(model, bundle)


def test_the_same_code_under_another_name_is_no_matter(save: Save, tmp_path: Path) -> None:
    bundle = save()
    (tmp_path / "my_attention.py").rename(tmp_path / "renamed.py")
    zoo.load_plugins("renamed.py")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_bundle(bundle)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (PluginSource(name="acme.attention"), r"it needs the module acme\.attention, whose code .*--plugins acme\.att"),
        (
            PluginSource(name="acme.attention", distribution="acme", version="1.2"),
            r"not registered here: install the package that offers it \(acme==1\.2\)$",
        ),
    ],
)
def test_a_module_and_a_package_are_named_as_such(save: Save, source: PluginSource, message: str) -> None:
    with pytest.raises(MissingPluginError, match=message):
        load_bundle(save(plugins=(source,)))


def test_a_card_without_its_plugin_gives_the_nearest_name(save: Save) -> None:
    with pytest.raises(BundleError, match="cannot build the model: unknown attention 'mine', did you mean"):
        load_bundle(save(plugins=()))
