import json

import pytest
from pydantic import ValidationError

from train.config import TrackingConfig, TrainConfig

REQUIRED = '"name": "x", "model": {"backbone": "vit"}, "data": {"root": "builtin:digits"}'


def build(**sections: str) -> TrainConfig:
    extra = "".join(f', "{name}": {text}' for name, text in sections.items())
    return TrainConfig.model_validate_json(f"{{{REQUIRED}{extra}}}")


def test_defaults_pass_their_own_validation():
    config = build()
    assert TrainConfig.model_validate_json(config.model_dump_json()) == config


def test_every_field_has_help_text():
    for name, field in TrainConfig.model_fields.items():
        inner = getattr(field.annotation, "model_fields", None)
        if inner is None:
            assert field.description, name
        else:
            assert field.annotation.__doc__, name
            for key, sub in inner.items():
                assert sub.description, f"{name}.{key}"


@pytest.mark.parametrize("name", ["a/b", "a:b", "a\\b", ".", "..", ".hidden", " a", "a ", "a\nb", "a" * 201])
def test_name_that_mlflow_or_a_folder_cannot_bear_is_refused(name):
    with pytest.raises(ValidationError, match="name"):
        TrainConfig.model_validate({"name": name, "model": {"backbone": "v"}, "data": {"root": "r"}})


@pytest.mark.parametrize("name", ["digits", "日本 語", "vit-tiny.v2_a"])
def test_good_name_is_accepted_and_names_the_run_folder(name):
    config = TrainConfig.model_validate({"name": name, "model": {"backbone": "v"}, "data": {"root": "r"}})
    assert str(config.run_dir) == f"runs/{name}"


@pytest.mark.parametrize("alias", ["latest", "Latest", "v3", "V10", "a b", "a/b", ""])
def test_alias_that_mlflow_refuses_is_refused(alias):
    with pytest.raises(ValidationError, match=r"publish\.alias"):
        build(publish=f'{{"alias": "{alias}"}}')


@pytest.mark.parametrize(
    ("section", "text", "message"),
    [
        ("schedule", '{"epochs": 3, "warmup_epochs": 4}', "warmup_epochs 4 is more than epochs 3"),
        ("augment", '{"scale": [0.9, 0.1]}', "scale: smallest first"),
        ("augment", '{"scale": [0.9, 1.5]}', "at most the image's area"),
        ("augment", '{"shift_px": 1}', "shift_px 1 needs crop: shift"),
        ("augment", '{"auto_augment": "rand-m9", "color_jitter": 0.4}', "no effect beside auto_augment"),
        ("optimizer", '{"betas": [0.9, 1.0]}', "less than 1"),
        ("optimizer", '{"lr": NaN}', "finite"),
        ("optimizer", '{"lr": "1e-3"}', "valid number"),
        ("loop", '{"compile": 1}', "valid boolean"),
    ],
)
def test_what_does_not_fit_together_or_in_range_is_refused(section, text, message):
    with pytest.raises(ValidationError, match=message):
        build(**{section: text})


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"pretrained": True, "init": "torch"}, "not both"),
        ({"timm_kwargs": {"num_classes": 3}}, "num_classes is read off the data"),
        ({"timm_kwargs": {"pretrained": True}}, "pretrained has its own field"),
        ({"timm_kwargs": {"a:1": None}}, "'a:1' is no name of an argument"),
        ({"timm_kwargs": {"drop_rate": float("nan")}}, "not JSON compliant"),
    ],
)
def test_model_section_refuses_contradictions(model, message):
    with pytest.raises(ValidationError, match=message):
        TrainConfig.model_validate_json(
            json.dumps({"name": "x", "model": {"backbone": "v", **model}, "data": {"root": "r"}})
        )


def test_timm_kwargs_keep_their_json_types():
    kwargs = {"depth": 2, "drop_rate": 0.0, "qk_norm": True, "img_size": [8, 8], "act_layer": "gelu", "x": None}
    config = TrainConfig.model_validate(
        {"name": "x", "model": {"backbone": "v", "timm_kwargs": kwargs}, "data": {"root": "r"}}
    )
    back = TrainConfig.model_validate_json(config.model_dump_json()).model.timm_kwargs
    assert back == kwargs
    assert [type(v) for v in back.values()] == [type(v) for v in kwargs.values()]


def test_due_counts_from_one():
    config = build(evaluate='{"every_epochs": 3}', log='{"every_steps": 2}')
    assert [e for e in range(1, 8) if config.evaluate.due(e)] == [3, 6]
    assert [s for s in range(1, 6) if config.log.due(s)] == [2, 4]
    assert config.checkpoint.due(1)


def test_a_password_in_the_tracking_uri_is_not_dumped() -> None:
    config = TrackingConfig(uri="http://ada:secret@tracking:5000")
    assert config.uri == "http://ada:secret@tracking:5000"
    assert config.model_dump(mode="json")["uri"] == "http://tracking:5000"
    assert "secret" not in config.model_dump_json()
