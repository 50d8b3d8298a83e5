"""Every attention class and configuration that has a row, as numbers: a swapped model computes what timm's does."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from timm.layers import DropPath
from torch import Tensor, nn

import zoo
from zoo.projections import Projection
from zoo.slots import iter_attentions
from zoo.timm_map import ROWS

BuildForm = Callable[..., nn.Module]
BytesOf = Callable[[nn.Module], dict[str, bytes]]
Run = Callable[..., "Outcome"]

# Attention of one query, which `x @ W` of one image multiplies as a single row: the one product that the matrix library
# sums in another order for a transposed matrix. Of two rows as well; from four on the sums are the same.
ONE_QUERY = ("cait", "cait_unfused", "crossvit", "volo", "xcit")


@dataclass(frozen=True)
class Outcome:
    """A forward and backward: logits, gradients under timm's names, and the buffers afterwards."""

    logits: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


@pytest.fixture(scope="session")
def run(
    run_form: Callable[..., Tensor], gradients_of: Callable[[nn.Module], dict[str, Tensor]]
) -> Callable[..., Outcome]:
    """Run a model of a form once, in train mode with dropout of every kind or in eval mode, from the same seed."""

    def run_once(model: nn.Module, form: str, *, training: bool = False, count: int = 4) -> Outcome:
        model.train(training).zero_grad(set_to_none=True)
        for module in model.modules():
            if isinstance(module, nn.Dropout) and not module.inplace:  # TNT's, after softmax, breaks timm's backward
                module.p = 0.2
            if isinstance(module, DropPath):
                module.drop_prob = 0.1
        torch.manual_seed(3)
        logits = run_form(model, form, count)
        logits.square().sum().backward()
        return Outcome(logits.detach(), gradients_of(model), dict(model.named_buffers()))

    return run_once


@pytest.fixture(scope="session")
def run_stock(build_form: BuildForm, run: Run) -> Run:
    """Run stock timm's model of a form; each once, however many variants are compared with it."""
    known: dict[tuple[str, bool], Outcome] = {}

    def run_once(form: str, *, training: bool) -> Outcome:
        if (form, training) not in known:
            known[form, training] = run(build_form(form), form, training=training)
        return known[form, training]

    return run_once


def assert_same(got: Outcome, wanted: Outcome) -> None:
    assert torch.equal(got.logits, wanted.logits)
    assert wanted.logits.isfinite().all()
    for mine, theirs in ((got.gradients, wanted.gradients), (got.buffers, wanted.buffers)):
        assert mine.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert torch.equal(mine[name], tensor), name


@pytest.mark.parametrize(
    "training", [pytest.param(False, id="eval"), pytest.param(True, id="train", marks=pytest.mark.slow)]
)
def test_a_swapped_model_gives_timms_logits_gradients_and_buffers_bit_for_bit(
    build_form: BuildForm, run: Run, run_stock: Run, every_form: str, variant: str, training: bool
) -> None:
    model = build_form(every_form)
    report = zoo.swap_attention(model, variant)
    assert report.modules == tuple(name for name, _ in iter_attentions(model))
    assert_same(run(model, every_form, training=training), run_stock(every_form, training=training))


@pytest.mark.parametrize("one_query", ONE_QUERY)
def test_attention_of_one_query_differs_by_rounding_alone(build_form: BuildForm, run: Run, one_query: str) -> None:
    ours, stock = build_form(one_query), build_form(one_query)
    zoo.swap_attention(ours, "parameter")
    got, wanted = (run(model, one_query, count=1) for model in (ours, stock))
    torch.testing.assert_close(got.logits, wanted.logits, rtol=0, atol=1e-6)
    scale = max(gradient.abs().max() for gradient in wanted.gradients.values())  # some are zero but for rounding
    for name, gradient in wanted.gradients.items():
        torch.testing.assert_close(got.gradients[name] / scale, gradient / scale, rtol=0, atol=2e-5, msg=name)


@pytest.mark.parametrize("fault", ["weight", "bias", "buffer"])
def test_the_comparison_sees_one_number(build_form: BuildForm, run: Run, run_stock: Run, fault: str) -> None:
    model = build_form("levit")
    zoo.swap_attention(model, "separate")
    with torch.no_grad():
        first = {
            "weight": model.get_parameter("stages.0.blocks.0.attn.qkv.linear.to_k.weight")[0],
            "bias": model.get_parameter("stages.2.blocks.0.attn.proj.ln.bn.bias"),
            "buffer": model.get_buffer("stages.1.downsample.attn_downsample.kv.bn.running_var"),
        }
        first[fault][0] += 0.01
    got, wanted = run(model, "levit"), run_stock("levit", training=False)
    with pytest.raises(AssertionError):
        assert_same(got, wanted)


@pytest.mark.slow  # as a set
def test_stock_weights_load_into_a_swapped_model_and_come_back(
    build_form: BuildForm, bytes_of: BytesOf, every_form: str, variant: str
) -> None:
    stock, model = build_form(every_form), build_form(every_form, seed=1)
    zoo.swap_attention(model, variant)
    model.load_state_dict(stock.state_dict(), strict=True)
    zoo.restore_attention(model)
    assert list(model.state_dict()) == list(stock.state_dict())
    assert bytes_of(model) == bytes_of(stock)
    build_form(every_form, seed=2).load_state_dict(model.state_dict(), strict=True)
    assert not any(isinstance(module, Projection) for module in model.modules())


@pytest.mark.slow
def test_every_class_that_has_a_row_is_among_the_forms(build_form: BuildForm, all_forms: tuple[str, ...]) -> None:
    seen = {type(module) for form in all_forms for _, module in iter_attentions(build_form(form))}
    names = {f"{cls.__module__}.{cls.__qualname__}" for cls in seen}
    assert ROWS.keys() - names == {"zoo.attention.Attention"}
