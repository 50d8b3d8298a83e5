from pathlib import Path

from tests.train.tiny import tiny_config
from train.equality.facts import hash_sources, start_facts

ROOT = Path(__file__).parent.parent.parent.parent


def test_every_source_file_of_the_three_packages_is_hashed() -> None:
    found = hash_sources()
    assert {"zoo/swap.py", "train/loop.py", "train/recipes/digits.yaml", "zoo/survey.json", "serve/app.py"} <= set(
        found
    )
    assert found == hash_sources()
    assert all((ROOT / name).is_file() for name in found)
    assert not any("__pycache__" in name for name in found)


def test_password_of_the_tracking_store_is_in_no_fact() -> None:
    config = tiny_config("images", tracking__uri="postgresql://user:hunter2@host/db")
    facts = start_facts(config, {})
    assert "hunter2" not in str(facts)
    assert "host/db" in str(facts["config: tracking.uri"])


def test_places_of_one_machine_are_left_out_and_their_kind_is_kept() -> None:
    facts = start_facts(tiny_config("images", model__pretrained="bundle", model__backbone="local-dir:/models/vit"), {})
    assert not [
        name for name in facts if name.startswith(("config: data.root", "config: log.", "config: model.plugins"))
    ]
    assert facts["config: model.pretrained"] is True
    assert facts["config: model.backbone"] == "local-dir:"
    assert start_facts(tiny_config("images"), {})["config: model.pretrained"] is False


def test_versions_and_the_world_are_there() -> None:
    facts = start_facts(tiny_config("images"), {"WORLD_SIZE": "4"})
    assert facts["world: WORLD_SIZE"] == "4"
    assert facts["version: timm"]
    assert facts["torch: float32 matmul precision"] == "highest"
