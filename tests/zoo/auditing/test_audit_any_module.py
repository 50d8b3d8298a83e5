"""The audit on models that have nothing to do with the zoo: no alarm where all is well, a word where it is not."""

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import nn
from torch.nn.utils import parametrizations, prune

import zoo
from zoo.errors import ZooError


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.complex64) @ self.weight


def build_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    )


def build_pruned() -> nn.Module:
    return prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5)


def build_empty() -> nn.Module:
    model = nn.Linear(4, 4)
    model.nothing = nn.Parameter(torch.empty(0, 4))
    return model


def build_ema() -> nn.Module:
    return timm.utils.ModelEmaV3(nn.Linear(4, 4))


X = torch.ones(2, 4)
TOKENS = torch.ones(2, 3, 8)
HEALTHY: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "cnn": (build_cnn, torch.ones(2, 3, 8, 8)),
    "transformer": (lambda: nn.Transformer(8, 2, 2, 2, 16, batch_first=True), (TOKENS, TOKENS)),
    "transformer encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
        TOKENS,
    ),
    "multihead attention": (lambda: nn.MultiheadAttention(8, 2), (TOKENS, TOKENS, TOKENS)),
    "lstm": (lambda: nn.LSTM(4, 3, num_layers=2), X),
    "sparse embedding": (
        lambda: nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 4)),
        torch.tensor([[1, 2]]),
    ),
    "parametrized weight norm": (lambda: parametrizations.weight_norm(nn.Linear(4, 4)), X),
    "parametrized spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(4, 4)), X),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(4, 4)), X),
    "old spectral norm": (lambda: nn.utils.spectral_norm(nn.Linear(4, 4)), X),
    "pruned": (build_pruned, X),
    "complex": (Complex, X),
    "zero size": (build_empty, X),
    "bfloat16": (lambda: nn.Linear(4, 4, dtype=torch.bfloat16), X.bfloat16()),
    "meta": (lambda: nn.Linear(4, 4, device="meta"), X.to("meta")),
    "ema": (build_ema, X),
    "compiled child": (lambda: nn.Sequential(nn.Linear(4, 4), torch.compile(nn.Linear(4, 4), backend="eager")), X),
    "compiled": (lambda: torch.compile(nn.Linear(4, 4), backend="eager"), X),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_module_raises_no_alarm(name) -> None:
    build, batch = HEALTHY[name]
    torch.manual_seed(0)
    model = build()
    report = zoo.audit(model, torch.optim.SGD(model.parameters(), lr=0.1), batch=batch)
    assert [str(finding) for finding in report.findings if finding.severity != "note"] == []


@pytest.mark.slow
def test_torchvision_model_raises_no_alarm() -> None:
    model = torchvision.models.resnet18()
    report = zoo.audit(model, torch.optim.SGD(model.parameters(), lr=0.1), batch=torch.ones(2, 3, 64, 64))
    assert str(report) == "audit: 62 parameters, 62 trainable, 0 findings"


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_old_weight_norm_keeps_a_computed_tensor_which_is_no_fault() -> None:
    model = nn.utils.weight_norm(nn.Linear(4, 4))
    assert zoo.audit(model, torch.optim.SGD(model.parameters(), lr=0.1), batch=X).findings == ()
    model.requires_grad_(False)
    zoo.freeze(model, "*")
    model(X)  # computes the weight again, now without a graph
    assert [finding.check for finding in zoo.audit(model).errors] == ["requires_grad"]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
@pytest.mark.parametrize("make", [torch.jit.script, lambda model: torch.jit.trace(model, X)], ids=["script", "trace"])
def test_script_module_is_audited_as_it_stands_and_not_probed(make) -> None:
    model = make(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    optimizer = torch.optim.SGD(list(model.parameters())[:1], lr=0.1)
    (error,) = zoo.audit(model, optimizer).errors
    assert (error.check, error.tensor) == ("optimizer", "0.bias")
    with pytest.raises(ZooError, match="cannot copy a ScriptModule"):
        zoo.audit(model, batch=X)


def test_out_proj_of_multihead_attention_that_is_left_out_is_still_seen() -> None:
    class Cut(nn.MultiheadAttention):
        def forward(self, *tokens: torch.Tensor) -> torch.Tensor:
            out, _ = super().forward(*tokens)
            return out.detach() + self.in_proj_weight.sum() + self.in_proj_bias.sum()

    errors = zoo.audit(Cut(8, 2), batch=(TOKENS, TOKENS, TOKENS)).errors
    assert [error.tensor for error in errors] == ["out_proj.weight", "out_proj.bias"]


def test_meta_model_is_audited_without_values() -> None:
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224")
    model.blocks[0].gain = torch.ones(1)
    model.blocks[1].norm1.weight.requires_grad_(False)
    assert [error.tensor for error in zoo.audit(model).errors] == ["blocks.0.gain", "blocks.1.norm1.weight"]
    assert zoo.audit(model).attentions == ()


def test_accelerates_wrapper_is_an_optimizer() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
    before = zoo.snapshot(wrapped, optimizer)
    accelerator.backward(wrapped(X).sum())
    optimizer.step()
    said = str(zoo.audit(wrapped, optimizer, before=before))
    assert before.steps == 1
    assert "error: optimizer: 1.weight: is trainable and in no optimizer group" in said
    assert "error: progress: 1.bias: did not change: no optimizer group held it" in said
    assert "0.weight" not in said
