import subprocess
from pathlib import Path

import mlflow
import pytest
import torch
from mlflow.exceptions import MlflowException

import zoo
from serve.errors import EngineError
from train import publish as publish_module
from train.config import PublishConfig
from train.errors import PublishError
from train.publish import (
    Champion,
    Published,
    beats,
    find_git_commit,
    find_lineage,
    find_takers,
    publish,
    write_bundle,
)
from zoo import plugins
from zoo import registry as zoo_registry
from zoo.card import EngineChoice, ModelCard, Preprocessing

# MLflow's own, not ours to mend
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
KWARGS = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}


def card(score: float = 0.5, images: str = "aaaa") -> ModelCard:
    return ModelCard(
        backbone="vit_tiny_patch16_224",
        timm_kwargs=dict(KWARGS),
        attention="parameter",
        class_names=("ash", "elm", "oak"),
        preprocessing=Preprocessing(size=(8, 8), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)),
        metrics={"val/top1": score},
        data_fingerprint=images,
    )


def model(seed: int = 0) -> torch.nn.Module:
    return zoo.create_model("vit_tiny_patch16_224", "parameter", seed=seed, num_classes=3, **KWARGS)


@pytest.fixture
def registry(tracked) -> mlflow.MlflowClient:
    """A store of its own, with a run under way."""
    mlflow.set_tracking_uri(tracked().tracking.uri)
    mlflow.set_experiment("zoo")
    mlflow.start_run()
    return mlflow.MlflowClient()


def publish_one(here: Path, score: float, images: str = "aaaa", *, name: str = "", **config: object) -> Published:
    path = write_bundle(model(), card(score, images), here / f"bundle{score}{images}{name}")
    return publish(path, card(score, images), "tiny", PublishConfig(**config))


@pytest.mark.parametrize(
    ("score", "images", "champion", "forced", "moves", "reason"),
    [
        (0.1, "a", None, False, True, "the first version"),
        (0.9, "a", Champion("3", 0.8, "a"), False, True, "0.9000 beats 0.8000"),
        (0.8, "a", Champion("3", 0.8, "a"), False, False, "0.8000 does not beat 0.8000"),
        (0.7, "a", Champion("3", 0.8, "a"), False, False, "0.7000 does not beat 0.8000"),
        (0.9, "b", Champion("3", 0.8, "a"), False, False, "other images"),
        (0.9, "a", Champion("3", None, None), False, False, "other images"),
        (0.1, "b", Champion("3", 0.8, "a"), True, True, "--publish.force"),
    ],
)
def test_alias_moves_to_a_better_score_on_the_same_images(score, images, champion, forced, moves, reason):
    moved, said = beats(score, images, champion, forced=forced)
    assert moved is moves
    assert reason in said


@pytest.mark.slow
def test_versions_are_registered_and_the_alias_follows_the_best(registry, here):
    first = publish_one(here, 0.5)
    assert str(first) == "tiny version 1, @champion -> version 1 (the first version)"
    assert registry.get_model_version("tiny", "1").tags == {
        "val/top1": "0.5",
        "val_fingerprint": "aaaa",
        "took_alias": "champion",
    }
    assert str(publish_one(here, 0.4)) == "tiny version 2, @champion -> version 1 (0.4000 does not beat 0.5000)"
    assert publish_one(here, 0.6).alias_version == "3"
    other = publish_one(here, 0.9, "bbbb")
    assert (other.version, other.alias_version) == ("4", "3")
    assert publish_one(here, 0.9, "bbbb", name="forced", force=True).alias_version == "5"
    registry.delete_model_version_tag("tiny", "5", "val/top1")
    assert publish_one(here, 0.95, "bbbb").alias_version == "5"
    assert publish_one(here, 0.1, name="other", alias="canary").alias_version == "7"
    assert [taker.version for taker in find_takers(registry, "tiny", "canary")] == ["7"]
    assert find_takers(registry, "Ann's", "canary") == []
    assert registry.get_model_version_by_alias("tiny", "champion").version in (5, "5")


@pytest.mark.slow
def test_of_two_that_end_together_the_better_has_the_alias_in_the_end(registry, here, monkeypatch):
    real = publish_module.beats
    better = []

    def beats_and_is_overtaken(*args, **kwargs):
        """The worse one has decided to take the alias; before it does, the better one takes it."""
        monkeypatch.setattr(publish_module, "beats", real)
        better.append(publish_one(here, 0.6, name="Ann's"))
        return real(*args, **kwargs)

    monkeypatch.setattr(publish_module, "beats", beats_and_is_overtaken)
    worse = publish_one(here, 0.5)
    assert str(better[0]) == "tiny version 2, @champion -> version 2 (the first version)"
    assert str(worse) == (
        "tiny version 1, @champion -> version 2 (version 2, published at the same time, has 0.6000, this one 0.5000)"
    )
    assert str(registry.get_model_version_by_alias("tiny", "champion").version) == "2"


@pytest.mark.slow
@pytest.mark.parametrize("images", ["aaaa", "bbbb"])
def test_alias_that_a_person_moves_meanwhile_stays_there(registry, here, monkeypatch, images):
    publish_one(here, 0.5)
    publish_one(here, 0.3)
    real = publish_module.find_takers

    def find_takers(*args):
        if registry.get_registered_model("tiny").aliases["champion"] in (3, "3"):
            registry.set_registered_model_alias("tiny", "champion", "2")
        return real(*args)

    monkeypatch.setattr(publish_module, "find_takers", find_takers)
    moved = publish_one(here, 0.9, images, name="late", force=images == "bbbb")
    assert moved.alias_version == ("2" if images == "aaaa" else "3")


@pytest.mark.parametrize("refusals", [1, 2])
@pytest.mark.usefixtures("registry")
def test_alias_that_two_make_at_once_is_set_a_second_time(monkeypatch, refusals):
    asked = []

    def collide(_client, *words):
        asked.append(words)
        if len(asked) <= refusals:
            raise MlflowException("duplicate key value violates unique constraint")

    monkeypatch.setattr(mlflow.MlflowClient, "set_registered_model_alias", collide)
    if refusals == 1:
        publish_module.set_alias(mlflow.MlflowClient(), "tiny", "champion", "1")
    else:
        with pytest.raises(MlflowException, match="duplicate key"):
            publish_module.set_alias(mlflow.MlflowClient(), "tiny", "champion", "1")
    assert asked == [("tiny", "champion", "1")] * 2


def break_a_bit(root: Path) -> None:
    (file,) = root.rglob("model.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 0x40
    file.write_bytes(content)


def cut(root: Path) -> None:
    (file,) = root.rglob("model.safetensors")
    file.write_bytes(file.read_bytes()[:-100])


def lose_the_card(root: Path) -> None:
    (file,) = root.rglob("card.json")
    file.unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [(break_a_bit, "failed its load-test"), (cut, "failed its load-test"), (lose_the_card, "holds 0 bundles")],
)
def test_version_that_fails_its_load_test_never_gets_the_alias(registry, here, monkeypatch, fault, said):
    real = mlflow.artifacts.download_artifacts

    def download_artifacts(*args, **kwargs):
        folder = real(*args, **kwargs)
        fault(Path(folder))
        return folder

    monkeypatch.setattr(mlflow.artifacts, "download_artifacts", download_artifacts)
    with pytest.raises(PublishError, match=rf"models:/tiny/1: {said}.*the alias was not moved"):
        publish_one(here, 0.5)
    assert registry.get_registered_model("tiny").aliases == {}


@pytest.mark.slow
def test_version_that_holds_another_model_never_gets_the_alias(registry, here, monkeypatch):
    from serve import package

    other = write_bundle(model(seed=1), card(), here / "other")
    real = package.log_bundle
    monkeypatch.setattr(package, "log_bundle", lambda _bundle: real(other))
    with pytest.raises(PublishError, match="failed its load-test, the alias was not moved"):
        publish_one(here, 0.5)
    assert registry.get_registered_model("tiny").aliases == {}


@pytest.mark.slow
def test_load_test_goes_through_the_engine_that_will_serve(registry, here, monkeypatch):
    from serve import package

    chosen = card().model_copy(update={"engine": EngineChoice(precision="bf16")})
    bundle = write_bundle(model(), chosen, here / "bundle")
    real, opened = package.open_engine, []

    def open_engine(path, its_card):
        engine, difference = real(path, its_card)
        opened.append(engine.choice)
        return engine, difference

    monkeypatch.setattr(package, "open_engine", open_engine)
    publish(bundle, chosen, "tiny", PublishConfig())
    assert opened == [chosen.engine]

    def refuse(*_args):
        raise EngineError("not installed here")

    monkeypatch.setattr(package, "open_engine", refuse)
    message = r"models:/tiny/2: failed its load-test, the alias was not moved: not installed here"
    with pytest.raises(PublishError, match=message):
        publish(bundle, chosen, "tiny", PublishConfig(force=True))
    assert registry.get_registered_model("tiny").aliases["champion"] in (1, "1")


@pytest.mark.usefixtures("registry")
def test_registry_that_refuses_is_one_line_and_the_bundle_is_kept(here, monkeypatch):
    from serve import package

    def refuse(*_args, **_kwargs):
        raise MlflowException("no\nroom")

    monkeypatch.setattr(package, "log_bundle", refuse)
    with pytest.raises(PublishError, match=r"tiny: the registry refused \(no room\); the bundle is kept in"):
        publish_one(here, 0.5)
    assert (here / "bundle0.5aaaa" / "model.safetensors").is_file()


def test_bundle_that_cannot_be_written_is_named(here):
    (here / "file").write_text("")
    with pytest.raises(PublishError, match=r"the bundle .*file/bundle cannot be written"):
        write_bundle(model(), card(), here / "file" / "bundle")


def test_lineage_names_run_commit_and_packages(here):
    assert find_git_commit() is None
    lineage = find_lineage("run1")
    assert (lineage.run_id, lineage.git_commit) == ("run1", None)
    assert lineage.packages["torch"] == torch.__version__.partition("+")[0]
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "file"], ["commit", "-qm", "one"]):
        (here / "file").write_text("one")
        subprocess.run([*git, *command], check=True)
    commit = find_git_commit()
    assert commit is not None
    assert len(commit) == 40
    (here / "file").write_text("two")
    assert find_git_commit() == f"{commit}+changes"


def test_machine_without_git_has_no_commit(here, monkeypatch):
    monkeypatch.setenv("PATH", str(here))
    assert publish_module.find_git_commit() is None


@pytest.mark.slow
def test_the_run_keeps_the_file_of_a_plugin_as_it_was_loaded(registry, here, monkeypatch):
    text = "import zoo\nfrom zoo.projections import SeparateProjection\n\n"
    text += "@zoo.register_attention('mine')\nclass Mine(SeparateProjection):\n    pass\n"
    (here / "my_attention.py").write_text(text)
    monkeypatch.setattr(zoo_registry, "_ATTENTIONS", dict(zoo_registry._ATTENTIONS))
    monkeypatch.setattr(plugins, "_LOADED", [])
    zoo.load_plugins("my_attention.py")
    (here / "my_attention.py").write_text("edited since")
    mine = card().model_copy(update={"attention": "mine", "plugins": zoo.plugin_sources("mine")})
    made = zoo.create_model("vit_tiny_patch16_224", "mine", seed=0, num_classes=3, **KWARGS)
    publish(write_bundle(made, mine, here / "bundle"), mine, "tiny", PublishConfig())
    run_id = mlflow.active_run().info.run_id
    (kept,) = registry.list_artifacts(run_id, "plugins")
    assert kept.path == "plugins/my_attention.py"
    assert Path(mlflow.artifacts.download_artifacts(run_id=run_id, artifact_path=kept.path)).read_text() == text
