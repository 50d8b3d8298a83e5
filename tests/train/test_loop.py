from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.train.tiny import build_tiny, tiny_config
from train import loop, meter
from train import step as step_module
from train.errors import NonFiniteLoss, ReplicaMismatch
from train.loop import fit, format_metrics, record
from train.meter import Meter
from train.run import Run
from train.step import StepResult
from zoo.errors import AuditError

# MLflow's own, not ours to mend
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")


class Notebook:
    """Keeps what it is told instead of a tracker."""

    def __init__(self) -> None:
        self.told: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], *, step: int) -> None:
        self.told.append((step, dict(metrics)))

    def pending(self) -> list[tuple[dict[str, float], int]]:
        return []

    def steps(self, key: str) -> list[int]:
        return [step for step, metrics in self.told if key in metrics]


def build(config, **changes: Any) -> tuple[Run, Notebook]:
    run, notebook = build_tiny(config), Notebook()
    run.tracker = notebook
    for name, value in changes.items():
        setattr(run, name, value)
    return run, notebook


def test_fit_trains_evaluates_saves_and_returns_the_last_score(tiny):
    run, notebook = build(tiny(schedule__epochs=3, evaluate__every_epochs=2, checkpoint__every_epochs=2))
    metrics = fit(run)
    assert run.step == run.total_steps == 18
    assert notebook.steps("train/loss") == list(range(1, 19))
    assert notebook.steps("val/top1") == [12, 18]
    assert [path.name for path in sorted(run.checkpoints.iterdir())] == ["step-00000012", "step-00000018"]
    assert notebook.told[-1] == (18, metrics)
    assert metrics.keys() == {"val/loss", "val/top1", "val/top5"}


def test_loss_falls(tiny):
    run, notebook = build(tiny(schedule__epochs=12, augment__enabled=False))
    fit(run)
    losses = [metrics["train/loss"] for _, metrics in notebook.told if "train/loss" in metrics]
    assert sum(losses[-6:]) < 0.7 * sum(losses[:6])


@pytest.mark.parametrize(("every", "steps"), [(5, [5, 10, 12]), (50, [12]), (6, [6, 12])])
def test_every_step_is_in_a_record_also_the_last_ones(tiny, every, steps):
    run, notebook = build(tiny(log__every_steps=every))
    fit(run)
    assert notebook.steps("train/loss") == steps


def test_record_is_the_mean_since_the_last(tiny, monkeypatch):
    run, notebook = build(tiny(), step=4, meter=Meter(mark=0.0))
    clock = iter([0.0, 2.0, 10.0, 12.0, 20.0, 22.0])
    monkeypatch.setattr(meter, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    for loss in (1.0, 2.0, 6.0):  # a step takes 2 s, what lies between the steps 8 s
        run.meter.go_on()
        run.meter.add(StepResult(torch.tensor(loss), lr=0.5, images=8))
    monkeypatch.undo()
    record(run, StepResult(torch.tensor(6.0), lr=0.5, images=8), loop.progress_bar(run))
    assert notebook.told == [(4, {"train/loss": 3.0, "train/lr": 0.5, "perf/images_per_s": 4.0})]


def test_metrics_are_phrased_with_four_digits():
    assert format_metrics({"val/top1": 0.123456, "train/lr": 1e-5}) == "val/top1=0.1235 train/lr=1e-05"


def test_parameter_that_forward_does_not_reach_is_named_after_the_first_step(tiny):
    run, _ = build(tiny())
    run.bare.spare = nn.Linear(4, 4)
    run.optimizer.add_param_group({"params": list(run.bare.spare.parameters())})
    with pytest.raises(AuditError, match=r"spare\.weight"):
        fit(run)
    assert run.step == 1


def test_first_step_that_fp16s_scaler_skips_is_not_audited_but_the_next_is(tiny, monkeypatch):
    run, _ = build(tiny())
    monkeypatch.setattr(type(run.accelerator), "mixed_precision", "fp16")
    run.bare.head.weight.register_hook(lambda gradient: gradient * (float("inf") if run.step < 2 else 1.0))
    step, audited = run.optimizer.optimizer.step, []
    monkeypatch.setattr(run.optimizer.optimizer, "step", lambda *_: step() if run.step >= 2 else None)
    real = loop.audit_first_step
    monkeypatch.setattr(loop, "audit_first_step", lambda run, before: (audited.append(run.step), real(run, before)))
    fit(run)
    assert audited == [3]


def test_nan_ends_the_fit_with_the_last_checkpoint_kept(tiny, monkeypatch):
    run, _ = build(tiny())
    real = step_module.F.cross_entropy

    def cross_entropy(*args, **kwargs):
        return real(*args, **kwargs) * (float("nan") if run.step == 8 else 1.0)

    monkeypatch.setattr(step_module.F, "cross_entropy", cross_entropy)
    with pytest.raises(NonFiniteLoss, match=r"step 8: the loss is nan on rank 0.* checkpoint is .*step-00000006"):
        fit(run)
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000006"]


def test_progress_bar_is_shown_only_to_somebody_who_watches(tiny):
    run, _ = build(tiny(log__progress=True))
    assert loop.progress_bar(run).disable  # no terminal here
    assert loop.progress_bar(build(tiny())[0]).disable


def drifting(accelerator, root: str) -> None:
    """Call the module inside the wrapper: nobody averages the gradients, and every rank trains alone."""
    run, _ = build(tiny_config(root))
    assert accelerator.num_processes == 2
    run.model = run.bare
    fit(run)


@pytest.mark.slow
def test_ranks_that_drift_apart_in_the_first_step_are_found(run_ranks, tiny, here):
    tiny()
    for outcome in run_ranks(drifting, root=str(here / "images")):
        assert outcome.error == ReplicaMismatch.__name__, outcome.traceback
        assert "after step 1" in outcome.message
        assert "rank 1" in outcome.message
