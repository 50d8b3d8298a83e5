"""Start a training from the weights of another: other classes, another image size, and it is said."""

from pathlib import Path

import pytest
import torch

import zoo
from tests.train.tiny import build_tiny, tiny_config, weights, write_images
from train.build import build_accelerator
from train.errors import CheckpointError, ConfigError, exit_status
from train.job import run_job
from train.report import describe_plan
from train.saving.checkpoint import MODEL, Resume, find_newest, read_state
from train.saving.resume import restore, save_checkpoint
from zoo.bundle import load_bundle
from zoo.errors import BackboneError

# MLflow's own, not ours to mend
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
LARGER = {"model__timm_kwargs": {"img_size": 12}}  # 3 x 3 patches where the first training had 2 x 2
FIVE = ("ash", "elm", "fir", "oak", "yew")


def checkpoint_of(config) -> Path:
    """Write the first checkpoint of a training of three classes, and return it."""
    run = build_tiny(config)
    save_checkpoint(run)
    return run.checkpoints / "step-00000000"


def test_a_checkpoint_of_ours_starts_a_training_of_other_classes_and_size(tiny, here):
    path = checkpoint_of(tiny(model__attention="separate"))
    root = write_images(here / "five" / "images", classes=FIVE)
    run = build_tiny(tiny_config(root, model__pretrained=str(path), **LARGER), wrapped=False)
    line = describe_plan(run).splitlines()[1]
    assert line.startswith(f"weights   18 tensors of {path / MODEL}; ")
    assert line.endswith("pos_embed: resampled 2x2 -> 3x3; head: replaced, 3 -> 5 classes")
    before, after = weights(build_tiny(tiny(model__attention="separate"))), weights(run)
    assert torch.equal(after["norm.weight"], before["norm.weight"])
    assert torch.equal(after["blocks.0.attn.qkv.to_q"], before["blocks.0.attn.qkv.to_q.weight"].t())
    drawn = weights(build_tiny(tiny_config(root, **LARGER), wrapped=False))
    assert torch.equal(after["head.weight"], drawn["head.weight"])


def test_nothing_is_said_where_nothing_was_loaded_or_a_checkpoint_goes_on(tiny):
    assert "weights   " not in describe_plan(build_tiny(tiny(), wrapped=False))
    path = checkpoint_of(tiny())
    run = build_tiny(tiny(model__pretrained=str(path)), wrapped=False)
    assert "weights   20 tensors of " in describe_plan(run)
    run.step = 3
    assert "weights   " not in describe_plan(run)


def test_ties_of_a_checkpoint_are_ties_of_the_fine_tuned_model_whether_asked_for_again_or_not(tiny):
    tie = "blocks.0.norm1.weight = blocks.0.norm2.weight"
    path = checkpoint_of(tiny(tie=[tie]))
    for fields in ({}, {"tie": [tie]}, {"model__attention": "linear"}):
        model = build_tiny(tiny(model__pretrained=str(path), **fields), wrapped=False).bare
        assert model.get_parameter("blocks.0.norm1.weight") is model.get_parameter("blocks.0.norm2.weight")


@pytest.mark.parametrize(
    ("pretrained", "error", "said"),
    [
        ("nowhere", BackboneError, "pretrained nowhere: nothing is there; wanted a bundle, a checkpoint, "),
        ("images", BackboneError, r"pretrained images: no model\.safetensors that could be read here"),
    ],
)
def test_a_path_without_weights_is_the_users_mistake_before_data_is_read(tiny, pretrained, error, said):
    with pytest.raises(error, match=said) as caught:
        build_tiny(tiny(model__pretrained=pretrained, data__root="no-such-folder"))
    assert exit_status(caught.value) == 2


@pytest.mark.parametrize("wrong", [3, "", None, ["a"]])
def test_what_is_neither_a_switch_nor_a_path_is_named(tiny, wrong):
    with pytest.raises(ConfigError, match=r"^model\.pretrained: got .*, wanted true, false, or a path$"):
        tiny(model__pretrained=wrong)


def test_weights_and_a_scheme_exclude_each_other(tiny):
    with pytest.raises(ConfigError, match="set init or pretrained, not both"):
        tiny(model__pretrained="bundle", model__init="torch")


def test_resume_is_no_fine_tuning_it_names_both_class_counts_and_both_sizes(tiny, here):
    path = checkpoint_of(tiny())
    resume = Resume(path, read_state(path))
    root = write_images(here / "five" / "images", classes=FIVE)
    run = build_tiny(tiny_config(root), wrapped=False)
    start = weights(run)
    with pytest.raises(CheckpointError, match=r"was trained on 3 classes \(ash, elm, oak\), the data now has 5 \(ash"):
        restore(run, resume)
    assert all(torch.equal(tensor, start[name]) for name, tensor in weights(run).items())
    with pytest.raises(CheckpointError, match=r"model\.timm_kwargs\.img_size was 8 and is 12"):
        restore(build_tiny(tiny(**LARGER), wrapped=False), resume)


@pytest.mark.slow
def test_a_bundle_of_three_classes_is_fine_tuned_to_five_at_another_size(tracked, here, capsys):
    first = tracked(publish__enabled=True, schedule__epochs=1, schedule__warmup_epochs=0)
    run_job(first, build_accelerator(first.loop))
    bundle = next(first.run_dir.glob("*/bundle"))
    root = write_images(here / "five" / "images", classes=FIVE)
    fields = {"model__pretrained": str(bundle), "output_dir": str(here / "tuned"), "schedule__epochs": 1}
    store = {"tracking__uri": f"sqlite:///{here}/mlflow.db", "schedule__warmup_epochs": 0}
    config = tiny_config(root, **fields, **store, **LARGER)
    capsys.readouterr()
    run_job(config, build_accelerator(config.loop))
    out = capsys.readouterr().out
    assert f"weights   18 tensors of {bundle}/model.safetensors; pos_embed: resampled 2x2 -> 3x3" in out
    assert "head: replaced, 3 -> 5 classes" in out
    model, card = load_bundle(next(config.run_dir.glob("*/bundle")))
    assert card.class_names == FIVE
    assert card.preprocessing.size == (12, 12)
    assert model(torch.zeros(1, 3, 12, 12)).shape == (1, 5)
    assert find_newest(config.run_dir) is not None
    assert zoo.find_report(model) is None
