"""Ties through a swap: one tensor under two names stays one tensor, or the swap is refused."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import zoo
from zoo.errors import SwapError
from zoo.slots import find_places, iter_attentions

BuildStock = Callable[..., nn.Module]
BytesOf = Callable[[nn.Module], dict[str, bytes]]
NAMES = ("blocks.0.attn", "blocks.2.attn")


def tie_weights(model: nn.Module) -> None:
    first, last = (model.get_submodule(f"{name}.qkv") for name in NAMES)
    last.weight = first.weight


def share_a_linear(model: nn.Module) -> None:
    model.get_submodule(NAMES[1]).qkv = model.get_submodule(f"{NAMES[0]}.qkv")


def tie_outputs_crosswise(model: nn.Module) -> None:
    """Tie one block's output projection to another's, and their biases to a third's."""
    a, b, c = (model.get_submodule(f"blocks.{i}.attn.proj") for i in range(3))
    b.weight, c.bias = a.weight, a.bias


TIES = [tie_weights, share_a_linear, tie_outputs_crosswise]


def tied_names(model: nn.Module) -> set[frozenset[str]]:
    names: dict[int, set[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), set()).add(name)
    return {frozenset(group) for group in names.values() if len(group) > 1}


@pytest.mark.parametrize("plant", TIES)
def test_ties_stay_through_a_swap_and_back(
    build_stock: BuildStock, images: Tensor, bytes_of: BytesOf, variant: str, plant: Callable[[nn.Module], None]
) -> None:
    model = build_stock()
    plant(model)
    stock_ties, before, logits = tied_names(model), bytes_of(model), model(images)
    zoo.swap_attention(model, variant)
    assert len(list(model.parameters())) < len(list(model.named_parameters(remove_duplicate=False)))
    assert torch.equal(model(images), logits)
    for group in tied_names(model):
        assert len(group) == 2
        assert len({name.rpartition(".")[2] for name in group}) == 1  # to_q with to_q
    zoo.restore_attention(model)
    assert tied_names(model) == stock_ties
    assert bytes_of(model) == before


def test_a_tied_fused_weight_becomes_three_ties_of_q_k_and_v(build_stock: BuildStock) -> None:
    model = build_stock()
    tie_weights(model)
    zoo.swap_attention(model, "parameter")
    assert tied_names(model) == {frozenset(f"{name}.qkv.to_{part}" for name in NAMES) for part in "qkv"}


@pytest.mark.parametrize("init", [None, "torch"])
def test_a_model_without_ties_gets_none(build_stock: BuildStock, form: str, variant: str, init: str | None) -> None:
    model = build_stock(form)
    zoo.swap_attention(model, variant, init=init, seed=0)
    assert tied_names(model) == set()


def test_ties_of_single_parts_stay_where_parts_stay_apart(build_stock: BuildStock, images: Tensor) -> None:
    model = build_stock()
    zoo.swap_attention(model, "parameter")
    first, last = (model.get_submodule(f"{name}.qkv") for name in NAMES)
    last.to_q = first.to_q
    last.to_k = last.to_v  # two parts of one projection
    wanted = model(images)
    zoo.swap_attention(model, "separate")
    assert tied_names(model) == {
        frozenset(f"{name}.qkv.to_q.weight" for name in NAMES),
        frozenset(f"{NAMES[1]}.qkv.to_{part}.weight" for part in "kv"),
    }
    assert torch.equal(model(images), wanted)


def tie_one_query(model: nn.Module) -> None:
    first, last = (model.get_submodule(f"{name}.qkv") for name in NAMES)
    last.to_q = first.to_q


def tie_query_and_key(model: nn.Module) -> None:
    first = model.get_submodule(f"{NAMES[0]}.qkv")
    first.to_k = first.to_q


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (tie_one_query, r"blocks\.0\.attn\.qkv\.to_q is tied to blocks\.2\.attn\.qkv\.to_q"),
        (tie_query_and_key, r"blocks\.0\.attn\.qkv\.to_q is tied to blocks\.0\.attn\.qkv\.to_k"),
    ],
)
def test_a_tie_of_one_part_cannot_become_a_part_of_a_fused_weight(
    build_stock: BuildStock, bytes_of: BytesOf, plant: Callable[[nn.Module], None], message: str
) -> None:
    model = build_stock()
    zoo.swap_attention(model, "parameter")
    plant(model)
    before, modules, ties = bytes_of(model), [id(module) for module in model.modules()], tied_names(model)
    with pytest.raises(SwapError, match=f"{message}, and the swap cannot keep .*; nothing was changed"):
        zoo.restore_attention(model)
    assert (bytes_of(model), [id(module) for module in model.modules()], tied_names(model)) == (before, modules, ties)


def test_a_tie_to_a_place_outside_of_the_swap_is_refused(build_stock: BuildStock, bytes_of: BytesOf) -> None:
    model = build_stock()
    model.register_parameter("other", model.get_parameter("blocks.1.attn.proj.weight"))
    before = bytes_of(model)
    with pytest.raises(SwapError, match=r"blocks\.1\.attn\.proj\.weight is tied to other"):
        zoo.swap_attention(model, "parameter")
    assert bytes_of(model) == before
    zoo.swap_attention(model, "separate")  # which leaves the output projection as it is
    assert tied_names(model) == {frozenset({"other", "blocks.1.attn.proj.weight"})}


def test_swapping_one_of_two_tied_blocks_is_refused(build_stock: BuildStock) -> None:
    model = build_stock()
    tie_weights(model)
    with pytest.raises(SwapError, match=r"blocks\.0\.attn\.qkv\.weight is tied to blocks\.2\.attn\.qkv\.weight"):
        zoo.swap_attention(model, "parameter", names="blocks.0.attn")


@pytest.mark.parametrize("plant", TIES)
def test_ties_come_back_when_a_swap_fails(
    build_stock: BuildStock,
    bytes_of: BytesOf,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[nn.Module], None],
) -> None:
    from zoo.projections import ParameterProjection

    model = build_stock()
    plant(model)
    before, ties = bytes_of(model), tied_names(model)
    count = sum(len(find_places(attention)) for _, attention in iter_attentions(model))
    original, calls = ParameterProjection.build, []

    def build(spec: object) -> nn.Module:
        calls.append(spec)
        if len(calls) == 2 * count:  # each is asked once on the meta device, once for good: the very last one
            raise MemoryError("planted")
        return original(spec)  # type: ignore[arg-type]

    monkeypatch.setattr(ParameterProjection, "build", build)
    with pytest.raises(MemoryError, match="planted"):
        zoo.swap_attention(model, "parameter")
    assert (bytes_of(model), tied_names(model)) == (before, ties)
