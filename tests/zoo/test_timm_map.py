import ast
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import timm
import timm.layers
import timm.models
import torch
from timm.layers import AttentionPoolLatent
from torch import nn

from zoo.attention import Attention
from zoo.slots import find_places, iter_attentions, iter_unmapped, looks_like_attention, outside_biases
from zoo.timm_map import NOT_IN_A_BLOCK, REFUSED, ROWS

BuildStock = Callable[..., nn.Module]

SLOTS = {
    "vit": ("qkv", "proj"),
    "rope": ("qkv", "proj"),
    "rope_grouped": ("q_proj", "k_proj", "v_proj", "proj"),
    "eva": ("qkv", "proj"),
    "eva_separate": ("q_proj", "k_proj", "v_proj", "proj"),
}
CLASSES = {"vit": "Attention", "rope": "AttentionRope", "rope_grouped": "AttentionRope", "eva": "EvaAttention"}


@pytest.mark.parametrize("form", SLOTS)
def test_present_slots_are_the_projections_that_a_module_holds(build_stock: BuildStock, form: str) -> None:
    names, attentions = zip(*iter_attentions(build_stock(form)), strict=True)
    assert names == ("blocks.0.attn", "blocks.1.attn", "blocks.2.attn")
    for attention in attentions:
        assert type(attention).__name__ == CLASSES.get(form, "EvaAttention")
        assert tuple(place.slot.child for place in find_places(attention)) == SLOTS[form]
        assert [part for place in find_places(attention) for part in place.layout.parts] == ["q", "k", "v", "out"]


def test_the_forms_under_test_cover_what_timm_builds(build_stock: BuildStock) -> None:
    attentions = {form: next(iter_attentions(build_stock(form)))[1] for form in ("vit_norms", "vit_gated_wide")}
    assert isinstance(attentions["vit_norms"].q_norm, nn.LayerNorm)
    assert isinstance(attentions["vit_norms"].norm, nn.LayerNorm)
    assert isinstance(attentions["vit_gated_wide"].gate, nn.Linear)
    grouped = build_stock("rope_grouped").get_submodule("blocks.1.attn")
    assert (grouped.get_parameter("q_proj.weight").shape[0], grouped.get_parameter("k_proj.weight").shape[0]) == (
        32,
        16,
    )
    assert isinstance(build_stock("eva_separate").get_submodule("blocks.0.attn.norm"), nn.LayerNorm)


def test_evas_biases_outside_are_seen_and_its_k_bias_is_constant(build_stock: BuildStock) -> None:
    biases = outside_biases(build_stock("eva").get_submodule("blocks.0.attn"))
    assert {part: isinstance(bias, nn.Parameter) for part, bias in biases.items()} == {"q": True, "k": False, "v": True}
    assert outside_biases(build_stock("eva_no_bias").get_submodule("blocks.0.attn")) == {}


def test_left_out_projection_is_no_slot() -> None:
    assert [place.slot.child for place in find_places(Attention(16, 1, 16))] == ["qkv"]


@pytest.mark.parametrize("name", sorted({*ROWS, *REFUSED, *NOT_IN_A_BLOCK}))
def test_a_class_stands_in_one_table_and_exists(name: str) -> None:
    assert sum(name in table for table in (ROWS, REFUSED, NOT_IN_A_BLOCK)) == 1
    module, _, qualname = name.rpartition(".")
    assert issubclass(getattr(importlib.import_module(module), qualname), nn.Module)


def test_pooling_heads_and_gates_are_no_attention_in_a_block() -> None:
    assert not looks_like_attention(AttentionPoolLatent(16, num_heads=2))
    assert not looks_like_attention(type("Derived", (AttentionPoolLatent,), {})(16, num_heads=2))
    assert looks_like_attention(type("TokenAttention", (nn.Module,), {})())
    assert looks_like_attention(type("AttentionPoolLatent", (nn.Module,), {})())  # the same name, another's


@pytest.mark.parametrize(
    ("backbone", "name", "cls"),
    [
        ("coatnet_pico_rw_224", "stages.2.blocks.0.attn", "Attention2d"),
        ("mobilevit_s", None, None),  # timm's own Attention inside
        ("mobilevitv2_050", "stages.2.1.transformer.0.attn", "LinearSelfAttention"),
        ("vit_small_plus_patch16_dinov3", None, None),
        ("cait_xxs24_224", None, None),  # LayerScaleBlockClassAttn is a block that holds ClassAttn
    ],
)
def test_unmapped_attention_is_found_by_class_not_by_children(backbone: str, name: str | None, cls: str | None) -> None:
    with torch.device("meta"):
        model = timm.create_model(backbone)
    found = next(iter_unmapped(model), None)
    assert (found and (found[0], type(found[1]).__name__)) == (name and (name, cls))


def test_children_of_a_mapped_attention_are_not_unmapped_attention() -> None:
    attention = Attention(16, 2, 8)
    attention.add_module("inner_attention", nn.MultiheadAttention(16, 2))
    assert list(iter_unmapped(nn.Sequential(attention))) == []
    assert [name for name, _ in iter_unmapped(nn.Sequential(nn.MultiheadAttention(16, 2)))] == ["0"]


# timm keeps these for old imports: each warns that its classes are elsewhere
_MOVED = {
    f"timm.models.{name}" for name in ("factory", "features", "fx_features", "helpers", "hub", "layers", "registry")
}
_PRODUCTS = {"matmul", "einsum", "bmm"}


def classes_in(module: ModuleType) -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield name and source of every nn.Module class that a module defines."""
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ClassDef) and issubclass(getattr(module, node.name, object), nn.Module):
            yield f"{module.__name__}.{node.name}", node


def mixes_tokens(source: ast.AST) -> bool:
    """Say whether a class's source attends: by scaled_dot_product_attention, or by a softmax and a product."""
    nodes = list(ast.walk(source))
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {node.id for node in nodes if isinstance(node, ast.Name)}
    has_product = bool(names & _PRODUCTS) or any(isinstance(node, ast.MatMult) for node in nodes)
    has_softmax = any("softmax" in name.lower() for name in names)
    return "scaled_dot_product_attention" in names or (has_softmax and has_product)


@pytest.mark.slow
def test_every_class_that_attends_stands_in_a_table_whatever_its_name() -> None:
    modules = [
        importlib.import_module(info.name)
        for package in (timm.layers, timm.models)
        for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
        if info.name not in _MOVED
    ]
    sources = {name: source for module in modules for name, source in classes_in(module)}
    attending = {name for name, source in sources.items() if mixes_tokens(source)}
    assert len(sources) > 700
    assert len(attending) > 60
    assert sorted(attending - ROWS.keys() - REFUSED.keys() - NOT_IN_A_BLOCK) == []


class Sieve(nn.Module):
    """A class of an unsuspicious name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.to_all(x).chunk(3, dim=-1)
        return (q @ k.transpose(-2, -1)).softmax(dim=-1) @ v


class Gate(nn.Module):
    """A softmax over channels: no scaled_dot_product_attention, no q @ k."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.fc(x).softmax(dim=1)  # scaled_dot_product_attention


def test_attention_of_an_unsuspicious_name_is_noticed() -> None:
    sources = dict(classes_in(sys.modules[__name__]))
    assert not looks_like_attention(Sieve())
    assert {name.rpartition(".")[2]: mixes_tokens(source) for name, source in sources.items()} == {
        "Sieve": True,
        "Gate": False,
    }


@pytest.mark.parametrize("name", sorted(ROWS))
def test_a_row_names_each_part_of_attention_once(name: str) -> None:
    row = ROWS[name]
    known = {"q", "k", "v", "out", "mlp"}
    assert row.children.keys() <= known
    for slot in row.slots:
        assert len(set(slot.parts)) == len(slot.parts)
        assert len(slot.widths) in (0, 1, len(slot.parts))
    assert {part for part, _ in row.biases} <= known
