"""The engine that is chosen as the bundle is written: what it takes, what it falls back to, what it says."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import torch
from pydantic import ValidationError

from serve.engines.eager import EagerEngine
from tests.train.tiny import build_tiny, tiny_config
from train.build import build_accelerator
from train.config import PublishConfig, TrainConfig
from train.engine import Equipped, list_choices, score_engine, write_equipped
from train.errors import PublishError
from train.job import run_job
from train.loaders import build_val_loader
from zoo import bundle as zoo_bundle
from zoo.bundle import load_bundle
from zoo.card import EngineChoice
from zoo.errors import ExportError

# MLflow's own, not ours to mend
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")
ONNX, EAGER, BF16 = EngineChoice(name="onnx"), EngineChoice(), EngineChoice(precision="bf16")


@pytest.mark.parametrize(
    ("config", "choices"),
    [
        ({}, [ONNX, EAGER]),
        ({"precision": "bf16"}, [BF16]),
        ({"engine": "onnx"}, [ONNX]),
        ({"engine": "eager"}, [EAGER]),
        ({"engine": "compile", "precision": "bf16"}, [EngineChoice(name="compile", precision="bf16")]),
    ],
)
def test_engines_are_tried_in_this_order(config: dict[str, Any], choices: list[EngineChoice]) -> None:
    assert list_choices(PublishConfig(**config)) == choices


def test_onnx_in_bf16_is_refused_before_a_training() -> None:
    with pytest.raises(ValidationError, match="the engine onnx computes in fp32, got bf16; take engine eager or compi"):
        PublishConfig(engine="onnx", precision="bf16")


def refuse(*_args: object) -> None:
    raise ExportError("torch.onnx cannot export this model: planned")


def write(run: Any, folder: Path) -> Equipped:
    card = run.card.model_copy(update={"metrics": {"val/top1": 0.5}})
    return write_equipped(run, run.bare, card, folder / "bundle")


def test_auto_falls_back_to_eager_and_says_why(
    tiny: Callable[..., TrainConfig], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zoo_bundle, "export_onnx", refuse)
    run = build_tiny(tiny(publish__engine="auto"))
    equipped = write(run, here)
    _, card = load_bundle(here / "bundle")
    assert card == equipped.card
    assert card.engine == EAGER
    assert str(equipped).startswith(
        "eager fp32 (not onnx: torch.onnx cannot export this model: planned), logits within"
    )
    assert str(equipped).endswith(f"of torch's; top-1 {card.metrics['serve/top1']:.2%} by it, 50.00% as evaluated")


def test_an_engine_asked_for_by_name_that_fails_keeps_the_model_and_names_the_way_out(
    tiny: Callable[..., TrainConfig], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zoo_bundle, "export_onnx", refuse)
    run = build_tiny(tiny(publish__engine="onnx"))
    with pytest.raises(
        PublishError, match=r"not onnx: .*planned\. .* kept in .*bundle.*--publish\.engine eager$"
    ) as caught:
        write(run, here)
    assert "\n" not in str(caught.value)
    model, card = load_bundle(here / "bundle")
    assert card.engine == EAGER
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in run.bare.state_dict().items())


@pytest.mark.slow
def test_a_run_that_ended_so_is_published_by_resuming_with_another_engine(
    tracked: Callable[..., TrainConfig], here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zoo_bundle, "export_onnx", refuse)
    short = {"schedule__epochs": 1, "schedule__warmup_epochs": 0}
    config = tracked(publish__engine="onnx", **short)
    with pytest.raises(PublishError, match="The trained model is kept in"):
        run_job(config, build_accelerator(config.loop))
    config = tiny_config(here / "images", resume="auto", publish__engine="eager", publish__precision="bf16", **short)
    run_job(config, build_accelerator(config.loop))
    out = capsys.readouterr().out
    assert re.search(r"^engine    eager bf16, logits within \d\.\de-0[345] of torch's; top-1", out, re.MULTILINE), out
    assert "registry  tiny version 1, @champion -> version 1" in out
    client = mlflow.MlflowClient(f"sqlite:///{here}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("attention-zoo").experiment_id])
    assert run.info.status == "FINISHED"
    assert 0 <= run.data.metrics["serve/top1"] <= 1
    _, card = load_bundle(next(config.run_dir.glob("*/bundle")))
    assert card.engine == BF16
    assert card.metrics["serve/top1"] == run.data.metrics["serve/top1"]


def test_the_score_is_that_of_the_engines_own_answers(tiny: Callable[..., TrainConfig]) -> None:
    run = build_tiny(tiny())
    loader = build_val_loader(run.data, run.config.evaluate, num_workers=0, rank=0, world_size=1)
    wanted = run.data.val.images.labels

    class Known(EagerEngine):
        """Finds the first seven labels, and no other."""

        asked = 0

        def __init__(self) -> None:
            pass

        def run(self, images: np.ndarray) -> np.ndarray:
            start = Known.asked
            Known.asked += len(images)
            right = np.eye(3, dtype=np.float32)[list(wanted[start : Known.asked])]
            right[max(0, 7 - start) :] *= -1
            return right

    assert score_engine(Known(), loader) == pytest.approx(7 / 9)


def test_what_the_engine_costs_in_accuracy_is_said(tiny: Callable[..., TrainConfig]) -> None:
    card = build_tiny(tiny()).card
    for served, said in ((0.75, "top-1 75.00% as evaluated"), (0.7, "top-1 70.00% by it, 75.00% as evaluated")):
        measured = card.model_copy(update={"engine": BF16, "metrics": {"val/top1": 0.75, "serve/top1": served}})
        assert str(Equipped(measured, 0.0123)) == f"eager bf16, logits within 1.2e-02 of torch's; {said}"
