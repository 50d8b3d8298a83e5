import hashlib
from pathlib import Path

import pytest
import torch

from tests.train.tiny import build_tiny, same, tiny_config, weights, write_images
from train.build import build_accelerator, build_model, build_run
from train.config import LoopConfig
from train.errors import ConfigError, exit_status
from train.step import train_step
from train.tracking import Tracker
from zoo import plugins, registry
from zoo.errors import ZooError
from zoo.freezing import find_frozen


def test_run_is_built_from_the_config_and_the_data(tiny):
    run = build_tiny(tiny(loop__accumulation_steps=3))
    assert run.data.class_names == run.card.class_names == ("ash", "elm", "oak")
    assert run.bare.head.out_features == 3
    assert run.card.timm_kwargs["depth"] == 1
    assert (run.steps_per_epoch, run.total_steps, run.warmup_steps) == (2, 4, 2)
    assert run.accelerator.gradient_accumulation_steps == 3


def test_weights_are_of_the_seed_alone(tiny):
    torch.manual_seed(1)
    first = weights(build_tiny(tiny(seed=3)))
    torch.manual_seed(2)
    assert same(weights(build_tiny(tiny(seed=3))), first)
    assert not same(weights(build_tiny(tiny(seed=4))), first)


@pytest.mark.parametrize("pattern", ["*", "all"])
def test_everything_frozen_is_one_line_and_the_users_mistake(tiny, pattern):
    with pytest.raises(ZooError, match=r"no trainable parameters: all .* are frozen") as caught:
        build_model(tiny(freeze=pattern), 3)
    assert "\n" not in str(caught.value)
    assert exit_status(caught.value) == 2


@pytest.mark.parametrize(("pattern", "trainable"), [("all but head", 2), ("blocks.0-0", 8), ("all but *.bias", 7)])
def test_freeze_takes_one_pattern_as_a_text(tiny, pattern, trainable):
    model = build_model(tiny(freeze=pattern), 3)
    assert sum(parameter.requires_grad for parameter in model.parameters()) == trainable


def test_block_beyond_the_model_is_refused_with_how_many_there_are(tiny):
    with pytest.raises(
        ZooError, match=r"unknown pattern 'blocks\.0-1', did you mean 'blocks\.0-0'.*blocks holds 1, 0 to 0"
    ):
        build_model(tiny(freeze=["head", "blocks.0-1"]), 3)


TWO = {"model__timm_kwargs": {"depth": 2}}
TIE = "blocks.0.mlp.fc1.weight = blocks.1.mlp.fc1.weight"


def test_tied_parameters_are_one_before_they_are_frozen_and_stepped(tiny):
    run = build_tiny(tiny(**TWO, tie=TIE), wrapped=False)
    shared = run.bare.blocks[0].mlp.fc1.weight
    assert run.bare.blocks[1].mlp.fc1.weight is shared
    held = [parameter for group in run.optimizer.param_groups for parameter in group["params"]]
    assert sum(parameter is shared for parameter in held) == 1
    frozen = build_model(tiny_config(run.config.data.root, **TWO, tie=[TIE], freeze="blocks.1.mlp.fc1.weight"), 3)
    assert not frozen.blocks[0].mlp.fc1.weight.requires_grad
    assert find_frozen(frozen) == {"blocks.0.mlp.fc1.weight", "blocks.1.mlp.fc1.weight"}


@pytest.mark.parametrize(
    ("ties", "said"),
    [
        ("blocks.0.mlp.fc1.weight", "cannot tie blocks.0.mlp.fc1.weight alone"),
        ("head.weight = blocks.0.mlp.fc1.weight", "its shape is"),
        (["head.weight = head.wieght"], "unknown parameter 'head.wieght', did you mean 'head.weight'"),
        ([["head.weight", "head.weight"]], "cannot tie head.weight to itself"),
    ],
)
def test_tie_that_cannot_be_made_is_one_line_and_the_users_mistake(tiny, ties, said):
    with pytest.raises(ZooError, match=said) as caught:
        build_model(tiny(tie=ties), 3)
    assert "\n" not in str(caught.value)
    assert exit_status(caught.value) == 2


def test_freeze_pattern_that_names_nothing_is_refused(tiny):
    with pytest.raises(ZooError, match="unknown pattern 'patch_embd', did you mean 'patch_embed'"):
        build_model(tiny(freeze=["patch_embd"]), 3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="fp16 works on a GPU")
def test_fp16_without_a_gpu_is_the_users_mistake():
    with pytest.raises(ConfigError, match=r"loop\.mixed_precision fp16 needs a GPU; bf16"):
        build_accelerator(LoopConfig(mixed_precision="fp16"))


@pytest.mark.parametrize("seed", [2**32 - 1, 2**40, 2**63 - 1])
def test_any_seed_that_the_config_takes_can_be_trained_with(tiny, seed):
    run = build_tiny(tiny(seed=seed))
    train_step(run, next(run.batches()))
    assert run.step == 1


def two_ranks(accelerator, root: str) -> dict[str, object]:
    """Look at what differs between the ranks and what does not."""
    config = tiny_config(root, model__timm_kwargs={"drop_rate": 0.5}, loop__batch_size_per_rank=3)
    run = build_tiny(config, wrapped=False)
    start = [round(tensor.double().sum().item(), 9) for tensor in weights(run).values()]
    run = build_tiny(config)
    images, _ = next(run.batches())[0]
    return {
        "start": start,
        "augmented": images.flatten(1).sum(1).tolist(),
        "dropout": torch.nn.functional.dropout(torch.ones(64)).tolist(),
        "ranks": accelerator.num_processes,
    }


@pytest.mark.slow
def test_ranks_start_equal_and_draw_apart(run_ranks, tmp_path):
    """All training images are one and the same, so that only the draws can make them differ."""
    files = sorted(write_images(tmp_path / "images").glob("train/*/*.png"))
    for file in files:
        file.write_bytes(files[0].read_bytes())
    first, second = run_ranks(two_ranks, root=str(tmp_path / "images"))
    assert not first.error, first.traceback
    assert first.value["start"] == second.value["start"]
    assert len(set(first.value["augmented"])) > 1
    assert not set(first.value["augmented"]) & set(second.value["augmented"])
    assert first.value["dropout"] != second.value["dropout"]


def fails_on_one(accelerator, root: str) -> None:
    """Let rank 1 alone find no data."""
    config = tiny_config(root if accelerator.process_index == 0 else f"{root}/none")
    build_run(config, accelerator, Tracker(config.tracking, main=False))


@pytest.mark.slow
def test_data_that_one_rank_cannot_see_stops_both(run_ranks, tmp_path):
    first, second = run_ranks(fails_on_one, root=str(write_images(tmp_path / "images")))
    assert (first.error, first.message) == (second.error, second.message) == ("DataError", first.message)
    assert first.message.endswith("(rank 1 of 2, building the run)")


PLUGIN = """import zoo
from zoo.projections import SeparateProjection

@zoo.register_attention("mine")
class Mine(SeparateProjection):
    pass
"""


@pytest.fixture
def own_plugins(monkeypatch):
    """Let a test load plugins that are gone when it ends."""
    monkeypatch.setattr(registry, "_ATTENTIONS", dict(registry._ATTENTIONS))
    monkeypatch.setattr(plugins, "_LOADED", [])
    monkeypatch.setenv("ZOO_PLUGIN_FILES", "[]")


@pytest.mark.usefixtures("own_plugins")
@pytest.mark.parametrize("given", ["my_attention.py", ["my_attention.py"]])
def test_a_plugin_is_loaded_before_names_are_checked_and_the_card_names_it(tiny, here, given):
    (here / "my_attention.py").write_text(PLUGIN)
    run = build_tiny(tiny(model__attention="mine", model__plugins=given))
    assert type(run.bare.blocks[0].attn.qkv).__name__ == "Mine"
    (source,) = run.card.plugins
    assert source.name == "my_attention.py"
    assert source.sha256 == hashlib.sha256(PLUGIN.encode()).hexdigest()


@pytest.mark.usefixtures("own_plugins")
def test_a_built_in_variant_needs_no_plugin_though_one_is_loaded(tiny, here):
    (here / "my_attention.py").write_text(PLUGIN)
    assert build_tiny(tiny(model__plugins="my_attention.py")).card.plugins == ()


@pytest.mark.usefixtures("own_plugins")
@pytest.mark.parametrize(
    ("text", "fields", "message"),
    [
        (PLUGIN, {"model__plugins": "my_atention.py"}, r"plugin my_atention\.py: no such file .*'my_attention\.py'"),
        ("x = 1 / 0", {"model__plugins": "my_attention.py"}, r"my_attention\.py, line 1: ZeroDivisionError"),
        (
            PLUGIN,
            {"model__plugins": "my_attention.py", "model__attention": "mien"},
            "unknown attention 'mien', did you",
        ),
        (PLUGIN, {"model__attention": "mine"}, "unknown attention 'mine'"),
    ],
)
def test_a_plugins_mistake_is_the_users_and_one_line(tiny, here, text, fields, message):
    (here / "my_attention.py").write_text(text)
    with pytest.raises(ZooError, match=message) as caught:
        build_tiny(tiny(**fields))
    assert "\n" not in str(caught.value)
    assert exit_status(caught.value) == 2


def with_plugin(accelerator, root: str, same: bool) -> list[str]:
    """Build a run of a plugin's variant; the file is of each rank's own, of one content or not."""
    folder = Path(root) / str(accelerator.process_index)
    folder.mkdir()
    (folder / "my_attention.py").write_text(PLUGIN if same else f"{PLUGIN}# {accelerator.process_index}\n")
    config = tiny_config(f"{root}/images", model__attention="mine", model__plugins=str(folder / "my_attention.py"))
    return [source.name for source in build_tiny(config).card.plugins]


@pytest.mark.slow
@pytest.mark.parametrize("same", [True, False])
def test_ranks_run_one_code(run_ranks, tmp_path, same):
    write_images(tmp_path / "images")
    first, second = run_ranks(with_plugin, root=str(tmp_path), same=same)
    if same:
        assert first.value == second.value == ["my_attention.py"], first.traceback
        return
    assert first.error == second.error == "ReplicaMismatch"
    assert first.message.startswith("model.plugins: rank 1 has other code of attention 'mine' than rank 0: ")
    assert "\n" not in first.message
