"""Every attention class and configuration that has a row, as numbers: a swapped model computes what timm's does."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from timm.layers import DropPath
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import zoo
from zoo.projections import Projection
from zoo.slots import iter_attentions
from zoo.timm_map import ROWS

pytestmark = pytest.mark.slow  # by their number

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


class _Masks(TorchFunctionMode):
    """Note what each call of scaled_dot_product_attention is told beside q, k and v."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            mask = kwargs.get("attn_mask")
            shuts = mask is not None and bool((mask == 0 if mask.dtype == torch.bool else mask < -1000).any())
            word = "all" if mask is None else "mask" if shuts else "bias"
            self.seen.append("causal" if kwargs.get("is_causal") else word)
        return func(*args, **kwargs)


@pytest.mark.parametrize(
    ("form", "wanted"),
    [
        ("vit", {"all"}),
        ("vit_mask", {"mask"}),
        ("vit_causal", {"causal"}),
        ("vit_unfused", set()),
        ("naflex", {"mask"}),
        ("rope_mask", {"mask"}),
        ("eva_mask", {"mask"}),
        ("eva_causal_unfused", set()),
        ("diff", {"all"}),
        ("diff_unfused", set()),
        ("beit", {"bias"}),
        ("beit_shared", {"bias"}),
        ("relpos", {"bias"}),
        ("relpos_shared", set()),
        ("sam", {"bias"}),
        ("swin", set()),
        ("swin_wide_fused", {"bias"}),  # the shifted windows' mask is part of it
        ("tiny_vit", {"bias"}),
    ],
)
def test_forms_attend_as_their_names_say(
    build_form: BuildForm, run_form: Callable[..., Tensor], form: str, wanted: set[str]
) -> None:
    with torch.no_grad(), _Masks() as masks:
        run_form(build_form(form), form)
    assert set(masks.seen) == wanted


def test_forms_have_the_parts_that_their_names_say(build_form: BuildForm) -> None:
    limits = [limit for name, limit in build_form("gemma4").named_buffers() if name.endswith(("_min", "_max"))]
    assert limits
    assert all(limit.isfinite() for limit in limits)
    shifts = {block.shift_size for stage in build_form("swin").layers for block in stage.blocks}
    assert shifts == {(0, 0), (2, 2)}
    grouped = [attention.num_kv_groups for _, attention in iter_attentions(build_form("rope_unfused"))]
    assert grouped == [1, 2]
    poolings = {attention.q_pool is None for _, attention in iter_attentions(build_form("sam2"))}
    assert poolings == {True, False}
    by_global = {attention.use_global for _, attention in iter_attentions(build_form("gcvit"))}
    assert by_global == {True, False}
    masked = {attention.use_mask_unit_attn for _, attention in iter_attentions(build_form("hiera"))}
    assert masked == {True, False}
    order = [next(iter_attentions(build_form(form)))[1].head_first for form in ("maxvit", "maxvit_tf")]
    assert order == [True, False]
