import sys

import pytest

from tests.train.tiny import build_tiny, tiny_config, write_images
from train import report
from train.publish import Published
from train.ranks import RankInfo
from zoo.card import PluginSource

PUBLISHED = Published("tiny", "2", "champion", "1", "0.4 does not beat 0.5")


def rank(number: int, hostname: str = "a", local_rank: int | None = None) -> RankInfo:
    local_rank = number if local_rank is None else local_rank
    return RankInfo(number, local_rank, f"cuda:{local_rank}", "nccl", hostname, 1)


def test_world_names_ranks_backend_and_devices():
    assert report.describe_world([rank(0), rank(1)]) == "2 ranks, backend nccl: rank 0 on cuda:0, rank 1 on cuda:1"
    assert report.describe_world([rank(0)]).startswith("1 rank, backend nccl")


@pytest.mark.parametrize("names", [("ada", "bob"), ("node", "node")])
def test_world_of_several_machines_names_them_also_where_their_names_are_equal(names):
    ranks = [rank(0, names[0]), rank(1, names[0]), rank(2, names[1], 0), rank(3, names[1], 1)]
    assert report.describe_world(ranks) == (
        f"4 ranks on 2 machines, backend nccl: {names[0]} (rank 0 on cuda:0, rank 1 on cuda:1), "
        f"{names[1]} (rank 2 on cuda:0, rank 3 on cuda:1)"
    )


def test_several_machines_are_told_who_writes_and_what_to_share(tiny, here):
    ranks = [rank(0, "ada"), rank(1, "bob", 0)]
    runs, images, store = here / "runs" / "tiny", here / "images", f"sqlite:///{here}/mlflow.db"
    assert report.describe_writes(tiny(), ranks) == (
        f"writes    ada alone, {runs} and the MLflow run in {store}; nothing on bob; "
        f"each machine reads its own {images}\n"
        f"          to resume with another machine as the first (--machine_rank 0), share {runs} and {store} with it"
    )
    assert report.describe_writes(tiny(), [rank(0), rank(1)]) == ""


def test_server_and_built_in_data_need_not_be_shared(tiny, here):
    config = tiny(tracking__uri="postgresql://ann:s3cret@host/mlflow", data__root="builtin:digits")
    said = report.describe_writes(config, [rank(0, "ada"), rank(1, "bob", 0)])
    assert "the MLflow run in postgresql://host/mlflow; nothing on bob\n" in said
    assert said.endswith(f"share {here / 'runs' / 'tiny'} with it")


def test_plan_and_result_say_what_is_trained_and_what_came_out(tiny):
    run = build_tiny(tiny(loop__accumulation_steps=3, loop__batch_size_per_rank=2))
    plan = report.describe_plan(run)
    assert "vit_tiny_patch16_224, attention parameter, init kept, 4," in plan
    assert "12 training and 9 validation images, 3 classes, input 8x8" in plan
    assert "2 epochs of 2 steps, global batch 6, peak lr 0.01, precision no" in plan
    result = report.describe_result(run, {"val/top1": 4 / 9, "val/loss": 1.0}, 3.2)
    assert result == "result    top-1 44.44% on 9 validation images (4 right), loss 1.000, trained in 3 s"


def test_next_commands_can_be_copied(tiny, here):
    run = build_tiny(tiny())
    said = report.describe_next(run, PUBLISHED, here / "my images" / "it's.jpg")
    assert "-m serve models:/tiny@champion" in said
    assert "Content-Type: image/jpeg" in said
    assert f"""--data-binary @'{here}/my images/it'"'"'s.jpg'""" in said
    assert "image/png" in report.describe_next(run, PUBLISHED, here / "3.png")
    assert "@IMAGE.jpg" in report.describe_next(run, PUBLISHED, None)


def test_the_command_that_serves_brings_the_plugin_along(tiny):
    run = build_tiny(tiny())
    run.config = tiny(model__plugins=["my attention.py", "other.py"])
    assert "--plugins" not in report.describe_next(run, PUBLISHED, None), "a built-in variant needs none"
    run.card = run.card.model_copy(update={"plugins": (PluginSource(name="my attention.py"),)})
    assert "@champion --plugins 'my attention.py,other.py'\n" in report.describe_next(run, PUBLISHED, None)


def test_next_commands_hold_no_password(tiny):
    run = build_tiny(tiny(tracking__uri="https://ann:s3cret@host:5000"))
    assert "look at it  https://host:5000\n" in report.describe_next(run, PUBLISHED, None)


def test_python_is_named_as_one_would_type_it(here, monkeypatch):
    assert report.find_python() == "python"
    monkeypatch.setattr(sys, "executable", str(here / ".venv" / "bin" / "python"))
    assert report.find_python() == ".venv/bin/python"


def test_example_of_images_in_files_is_the_file_and_nothing_is_written(tiny, here):
    run = build_tiny(tiny())
    example = report.write_examples(run, here / "examples")
    assert example.is_relative_to(here / "images" / "val" / "oak")
    assert not (here / "examples").exists()


def test_class_without_a_validation_image_is_left_out(here):
    root = write_images(here / "more" / "images", val=1, classes=("ash", "elm", "fir", "oak", "yew"))
    run = build_tiny(tiny_config(root))
    images = run.data.val.images
    assert report.write_examples(run, here / "examples").parent.name == "oak"
    for kept, shown in (((0, 1, 2, 4), "yew"), ((1, 2), "fir"), ((1,), "elm")):
        run.data.val.images = images.select([i for i, label in enumerate(images.labels) if label in kept])
        assert report.write_examples(run, here / "examples").parent.name == shown


@pytest.mark.slow
def test_examples_of_digits_are_written_one_for_each_class(here):
    run = build_tiny(tiny_config("builtin:digits", data__root="builtin:digits"))
    example = report.write_examples(run, here / "examples")
    assert example == here / "examples" / "3.png"
    assert sorted(path.name for path in (here / "examples").iterdir()) == [f"{i}.png" for i in range(10)]
