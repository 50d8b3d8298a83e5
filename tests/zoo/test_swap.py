import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from zoo.errors import SwapError, UnknownNameError
from zoo.projections import KINDS, ParameterProjection, Projection, ProjectionSpec
from zoo.slots import find_places, iter_attentions

BuildStock = Callable[..., nn.Module]
BytesOf = Callable[[nn.Module], dict[str, bytes]]


def logits_and_gradients(model: nn.Module, images: Tensor, seed: int = 5) -> tuple[Tensor, dict[str, Tensor]]:
    """Run one forward and backward; give the gradients under timm's names, those of parts put together again."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    logits = model(images)
    logits.square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name, attention in iter_attentions(model):
        for place in find_places(attention, name):
            child, layout = place.child, place.layout
            if isinstance(child, Projection):
                for kind in KINDS:
                    parts = {part: child.part_parameter(part, kind) for part in layout.parts}
                    for part in layout.parts:
                        gradients.pop(f"{place.name}.{child.stored_key(part, kind)}", None)
                    found = {part: p.grad for part, p in parts.items() if p is not None and p.grad is not None}
                    if found:
                        turned = kind == "weight" and child.transposed
                        gradients[f"{place.name}.{kind}"] = layout.join(
                            {part: grad.t() if turned else grad for part, grad in found.items()}
                        )
    return logits.detach(), gradients


def assert_same_run(ours: nn.Module, stock: nn.Module, images: Tensor) -> None:
    got_logits, got = logits_and_gradients(ours, images)
    logits, want = logits_and_gradients(stock, images)
    assert torch.equal(got_logits, logits)
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        assert torch.equal(got[name], gradient), name


def test_comparison_of_gradients_sees_one_changed_weight(build_stock: BuildStock, images: Tensor) -> None:
    ours, stock = build_stock(), build_stock()
    zoo.swap_attention(ours, "parameter")
    with torch.no_grad():
        ours.get_parameter("blocks.2.attn.qkv.to_k")[0, 0] += 0.5
    with pytest.raises(AssertionError):
        assert_same_run(ours, stock, images)


def test_swap_keeps_logits_and_gradients_bit_for_bit(
    build_stock: BuildStock, images: Tensor, form: str, variant: str
) -> None:
    ours, stock = build_stock(form), build_stock(form)
    report = zoo.swap_attention(ours, variant)
    assert report.modules == ("blocks.0.attn", "blocks.1.attn", "blocks.2.attn")
    assert_same_run(ours, stock, images)


def test_swap_keeps_a_training_step_with_dropout_bit_for_bit(
    build_stock: BuildStock, images: Tensor, form: str, variant: str
) -> None:
    kwargs = {"attn_drop_rate": 0.2, "proj_drop_rate": 0.2, "drop_path_rate": 0.1}
    ours, stock = build_stock(form, **kwargs).train(), build_stock(form, **kwargs).train()
    zoo.swap_attention(ours, variant)
    assert all(module.training for module in ours.modules())
    assert_same_run(ours, stock, images)


def test_restore_gives_back_timms_state_dict_bit_for_bit(
    build_stock: BuildStock, bytes_of: BytesOf, form: str, variant: str
) -> None:
    ours, stock = build_stock(form), build_stock(form)
    zoo.swap_attention(ours, variant)
    report = zoo.restore_attention(ours)
    assert (report.attention, len(report.modules)) == ("timm", 3)
    assert list(ours.state_dict()) == list(stock.state_dict())
    assert bytes_of(ours) == bytes_of(stock)
    build_stock(form, seed=1).load_state_dict(ours.state_dict(), strict=True)
    assert not any(isinstance(module, Projection) for module in ours.modules())


@pytest.mark.parametrize(("first", "second"), [*permutations(zoo.list_attentions(), 2)])
def test_every_variant_swaps_into_every_other(
    build_stock: BuildStock, bytes_of: BytesOf, form: str, first: str, second: str
) -> None:
    direct, via = build_stock(form), build_stock(form)
    zoo.swap_attention(direct, second)
    zoo.swap_attention(via, first)
    zoo.swap_attention(via, second)
    assert list(via.state_dict()) == list(direct.state_dict())
    assert bytes_of(via) == bytes_of(direct)


def test_stored_names_are_those_of_the_design(build_stock: BuildStock) -> None:
    model = build_stock()
    zoo.swap_attention(model, "parameter")
    shapes = {name: tuple(p.shape) for name, p in model.get_submodule("blocks.0.attn").named_parameters()}
    raw = {f"qkv.to_{part}": (32, 32) for part in "qkv"} | {f"qkv.to_{part}_bias": (32,) for part in "qkv"}
    assert shapes == raw | {"proj.projection": (32, 32), "proj.projection_bias": (32,)}
    zoo.swap_attention(model, "separate")
    assert isinstance(model.get_submodule("blocks.0.attn.qkv.to_q"), nn.Linear)
    assert type(model.get_submodule("blocks.0.attn.proj")) is nn.Linear


def test_swap_carries_requires_grad_part_by_part(build_stock: BuildStock) -> None:
    model = build_stock()
    model.get_parameter("blocks.0.attn.proj.weight").requires_grad_(False)
    zoo.swap_attention(model, "separate")
    model.get_parameter("blocks.1.attn.qkv.to_k.weight").requires_grad_(False)
    zoo.swap_attention(model, "parameter")
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {"blocks.0.attn.proj.projection", "blocks.1.attn.qkv.to_k"}


def test_half_frozen_weight_is_not_fused(build_stock: BuildStock, bytes_of: BytesOf) -> None:
    model = build_stock()
    zoo.swap_attention(model, "parameter")
    model.get_parameter("blocks.2.attn.qkv.to_k").requires_grad_(False)
    before, parameters = bytes_of(model), [id(p) for p in model.parameters()]
    for swap in (
        lambda: zoo.restore_attention(model),
        lambda: zoo.swap_attention(model, "linear", init="normal", seed=1),
    ):
        with pytest.raises(SwapError, match=r"blocks\.2\.attn\.qkv: q and k differ in requires_grad"):
            swap()
        assert bytes_of(model) == before
        assert [id(p) for p in model.parameters()] == parameters


def test_swap_keeps_dtype_and_device(build_stock: BuildStock, variant: str) -> None:
    model = build_stock().to(torch.bfloat16)
    zoo.swap_attention(model, variant)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    model.to("meta")
    zoo.swap_attention(model, "separate")
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_swap_keeps_train_and_eval_of_each_projection(build_stock: BuildStock) -> None:
    model = build_stock().train()
    model.get_submodule("blocks.1.attn").eval()
    zoo.swap_attention(model, "separate")
    flags = {name: module.training for name, module in model.named_modules() if name.endswith("to_q")}
    assert flags == {f"blocks.{i}.attn.qkv.to_q": i != 1 for i in range(3)}


@pytest.mark.parametrize("init", [None, "torch", "kaiming_raw", "normal", "trunc_normal", "timm"])
def test_swap_leaves_the_global_random_stream(build_stock: BuildStock, variant: str, init: str | None) -> None:
    model = build_stock()
    before = torch.get_rng_state()
    zoo.swap_attention(model, variant, init=init, seed=None if init is None else 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_stock_state_dict_loads_strictly_and_stays_as_it_was(
    build_stock: BuildStock, images: Tensor, form: str, variant: str
) -> None:
    ours, stock = build_stock(form, seed=1), build_stock(form)
    zoo.swap_attention(ours, variant)
    theirs = stock.state_dict()
    names, tensors = list(theirs), [id(tensor) for tensor in theirs.values()]
    ours.load_state_dict(theirs, strict=True)
    assert (list(theirs), [id(tensor) for tensor in theirs.values()]) == (names, tensors)
    assert_same_run(ours, stock, images)


def test_names_swap_some_only(build_stock: BuildStock, images: Tensor) -> None:
    ours, stock = build_stock(), build_stock()
    report = zoo.swap_attention(ours, "parameter", names=["blocks.[02].*"])
    assert (report.modules, report.left) == (("blocks.0.attn", "blocks.2.attn"), ("blocks.1.attn",))
    assert str(report) == "2 attention modules -> parameter, 1 left, weights carried over"
    assert type(ours.get_submodule("blocks.1.attn.qkv")) is nn.Linear
    assert_same_run(ours, stock, images)
    assert zoo.swap_attention(ours, "separate", names="blocks.1.attn").modules == ("blocks.1.attn",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention": "parametr"}, "unknown attention 'parametr', did you mean 'parameter'"),
        ({"attention": "parameter", "init": "kaiming"}, "unknown init 'kaiming', did you mean 'kaiming_raw'"),
        (
            {"attention": "parameter", "names": ["block.0.attn"]},
            "unknown attention module 'block.0.attn', did you mean 'blocks.0.attn'",
        ),
    ],
)
def test_unknown_name_gives_the_nearest(
    build_stock: BuildStock, bytes_of: BytesOf, arguments: dict[str, Any], message: str
) -> None:
    model = build_stock()
    before = bytes_of(model)
    with pytest.raises(UnknownNameError, match=message):
        zoo.swap_attention(model, **arguments)
    assert bytes_of(model) == before


def test_failure_midway_leaves_the_very_same_model(
    build_stock: BuildStock, bytes_of: BytesOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_stock()
    before, parameters = bytes_of(model), [id(p) for p in model.parameters()]
    original, calls = ParameterProjection.build, []

    def build(*args: Any, **kwargs: Any) -> nn.Module:
        calls.append(args)
        if len(calls) == 3:
            raise MemoryError("planted")
        return original(*args, **kwargs)

    monkeypatch.setattr(ParameterProjection, "build", build)
    with pytest.raises(MemoryError, match="planted"):
        zoo.swap_attention(model, "parameter")
    assert len(calls) == 3
    assert bytes_of(model) == before
    assert [id(p) for p in model.parameters()] == parameters


def test_failure_of_the_draw_puts_the_old_modules_back(build_stock: BuildStock, bytes_of: BytesOf) -> None:
    model = nn.Sequential(build_stock().get_submodule("blocks"))  # no timm model, so no init_weights
    before, modules = bytes_of(model), [id(module) for module in model.modules()]
    with pytest.raises(SwapError, match="Sequential has no init_weights"):
        zoo.swap_attention(model, "parameter", init="timm", seed=1)
    assert bytes_of(model) == before
    assert [id(module) for module in model.modules()] == modules


def test_init_with_names_is_refused(build_stock: BuildStock, bytes_of: BytesOf) -> None:
    model = build_stock()
    before = bytes_of(model)
    with pytest.raises(SwapError, match="init='torch' draws every attention"):
        zoo.swap_attention(model, "parameter", init="torch", names=["blocks.0.attn"])
    assert bytes_of(model) == before


@pytest.mark.usefixtures("own_registry")
def test_variant_that_keeps_less_is_refused(build_stock: BuildStock, bytes_of: BytesOf) -> None:
    @zoo.register_attention("forgetful")
    class Forgetful(ParameterProjection):
        @classmethod
        def build(cls, spec: ProjectionSpec) -> nn.Module:
            return ParameterProjection(replace(spec, bias=False))

    @zoo.register_attention("copies")
    class Copies(ParameterProjection):
        def part_tensors(self, kind: str) -> dict[str, Tensor]:
            return {part: tensor.clone() for part, tensor in super().part_tensors(kind).items()}

    @zoo.register_attention("whole")
    class Whole(nn.Module):
        pass

    model = build_stock()
    before = bytes_of(model)
    for name, message in (
        ("forgetful", r"blocks\.0\.attn\.qkv: Forgetful does not keep q's bias"),
        ("copies", r"blocks\.0\.attn\.qkv: Copies does not keep q's weight"),
        ("whole", "Whole is neither a zoo.projections.Projection nor a zoo.Attention"),
    ):
        with pytest.raises(SwapError, match=message):
            zoo.swap_attention(model, name, init="normal", seed=1)
        assert bytes_of(model) == before


def test_swap_keeps_nan_and_infinity(build_stock: BuildStock, bytes_of: BytesOf, variant: str) -> None:
    model = build_stock()
    with torch.no_grad():
        weight = model.get_parameter("blocks.0.attn.qkv.weight")
        weight[0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
    before = bytes_of(copy.deepcopy(model))
    zoo.swap_attention(model, variant)
    zoo.restore_attention(model)
    assert bytes_of(model) == before


def test_attention_pooling_heads_stay_as_they_are(build_stock: BuildStock, images: Tensor) -> None:
    kwargs: dict[str, Any] = {"global_pool": "map", "class_token": False}
    ours, stock = build_stock(**kwargs), build_stock(**kwargs)
    report = zoo.swap_attention(ours, "parameter")
    assert len(report.modules) == 3
    assert type(ours.get_submodule("attn_pool.q")) is nn.Linear
    assert_same_run(ours, stock, images)
