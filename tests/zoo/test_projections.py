import copy
import gc
from collections.abc import Callable

import pytest
import torch
from timm.models import named_apply
from torch import Tensor, nn
from torch.nn import functional as F

import zoo
from zoo.errors import ZooError
from zoo.layout import Layout
from zoo.projections import KINDS, LinearProjection, Projection, ProjectionSpec, fill_parts, part_tensors
from zoo.registry import find_attention

BuildStock = Callable[..., nn.Module]
SIDE_BY_SIDE = Layout({"q": 6, "k": 4, "v": 2})
BY_HEAD = Layout({"q": 6, "k": 4, "v": 2}, num_heads=2)


def build(variant: str, layout: Layout, *, bias: bool) -> nn.Module:
    module = find_attention(variant).build(ProjectionSpec(5, layout, bias))  # type: ignore[attr-defined]
    assert isinstance(module, nn.Module)
    generator = torch.Generator().manual_seed(1)
    for kind in KINDS:
        blank = part_tensors(module, layout, kind)
        values = {part: torch.randn(tensor.shape, generator=generator) for part, tensor in blank.items()}
        fill_parts(module, layout, kind, values)
    return module


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layout", [SIDE_BY_SIDE, Layout({"out": 7})])
def test_a_projection_is_the_product_with_each_part_side_by_side(variant: str, layout: Layout, bias: bool) -> None:
    pieces = project_each(module := build(variant, layout, bias=bias), layout, x := torch.randn(2, 3, 5), bias=bias)
    torch.testing.assert_close(module(x), torch.cat(list(pieces.values()), dim=-1))


@pytest.mark.parametrize("bias", [True, False])
def test_a_projection_by_heads_gives_each_head_its_parts(variant: str, bias: bool) -> None:
    pieces = project_each(module := build(variant, BY_HEAD, bias=bias), BY_HEAD, x := torch.randn(2, 3, 5), bias=bias)
    q, k, v = module(x).view(2, 3, 2, -1).split([3, 2, 1], dim=3)  # (B, N, H, widths), as LeViT reads it
    for got, part in ((q, "q"), (k, "k"), (v, "v")):
        torch.testing.assert_close(got.flatten(2), pieces[part])


def project_each(module: nn.Module, layout: Layout, x: Tensor, *, bias: bool) -> dict[str, Tensor]:
    weights, biases = (part_tensors(module, layout, kind) for kind in KINDS)
    assert biases.keys() == (weights.keys() if bias else set())
    assert {part: tuple(weight.shape) for part, weight in weights.items()} == {
        part: (size, 5) for part, size in layout.sizes.items()
    }
    return {part: x @ weight.t() + biases.get(part, 0.0) for part, weight in weights.items()}


@pytest.mark.parametrize("bias", [True, False])
def test_a_projection_offers_what_a_linear_offers(variant: str, bias: bool) -> None:
    module, x = build(variant, SIDE_BY_SIDE, bias=bias), torch.randn(2, 3, 5)
    weight, offset = module.weight, module.bias
    assert isinstance(weight, Tensor)
    assert (module.in_features, module.out_features, weight.shape) == (5, 12, (12, 5))
    assert isinstance(offset, Tensor) == bias
    assert torch.equal(F.linear(x, weight, offset if isinstance(offset, Tensor) else None), module(x))


def test_a_raw_matrix_is_used_as_x_at_w() -> None:
    module, x = build("parameter", Layout({"out": 7}), bias=False), torch.randn(2, 3, 5)
    raw = module.get_parameter("projection")
    assert raw.shape == (5, 7)
    assert torch.equal(module(x), x @ raw)


def test_the_weight_of_one_raw_matrix_is_a_view() -> None:
    module = build("parameter", Layout({"out": 7}), bias=True)
    assert isinstance(module, Projection)
    before = module.get_parameter("projection").detach().clone()
    module.weight.data.div_(2)
    assert torch.equal(module.get_parameter("projection"), before / 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [nn.Parameter(torch.zeros(12, 5)), torch.zeros(12, 5), None])
def test_replacing_a_projections_weight_is_refused_not_lost(kind: str, value: object) -> None:
    module = build("parameter", SIDE_BY_SIDE, bias=True)
    suffix = "_bias" if kind == "bias" else ""
    stored = ", ".join(f"to_{part}{suffix}" for part in "qkv")
    with pytest.raises(ZooError, match=rf"^ParameterProjection\.{kind} cannot become .* stored as {stored}; copy"):
        setattr(module, kind, value)
    assert set(dict(module.named_parameters())) == {*(f"to_{part}{end}" for part in "qkv" for end in ("", "_bias"))}


def test_a_projection_is_one_linear_layer_to_those_who_walk_a_model(variant: str) -> None:
    model = nn.Sequential(build(variant, SIDE_BY_SIDE, bias=True), nn.GELU())
    visited: list[nn.Module] = []
    model.apply(visited.append)
    named_apply(lambda module, **_: visited.append(module), model)
    assert visited == [model[0], model[1], model, model[0], model[1]]
    assert isinstance(model[0], nn.Linear)
    model.eval().double().requires_grad_(False)
    assert not any(module.training for module in model.modules())
    assert {(p.dtype, p.requires_grad) for p in model.parameters()} == {(torch.float64, False)}


@pytest.mark.parametrize("variant", ["separate", "parameter"])
def test_linear_and_single_part_forms_are_plain_linear_layers(variant: str) -> None:
    assert type(LinearProjection.build(ProjectionSpec(5, SIDE_BY_SIDE))) is nn.Linear
    plain = type(find_attention(variant).build(ProjectionSpec(5, Layout({"out": 7})))) is nn.Linear  # type: ignore[attr-defined]
    assert plain == (variant == "separate")


def test_building_leaves_the_random_stream(variant: str) -> None:
    before = torch.get_rng_state()
    build_class = find_attention(variant)
    build_class.build(ProjectionSpec(5, SIDE_BY_SIDE))  # type: ignore[attr-defined]
    assert torch.equal(torch.get_rng_state(), before)


def test_building_honours_device_and_dtype(variant: str) -> None:
    projection = find_attention(variant)
    spec = ProjectionSpec(5, BY_HEAD, device=torch.device("meta"), dtype=torch.bfloat16)
    module = projection.build(spec)  # type: ignore[attr-defined]
    assert {(p.device.type, p.dtype) for p in module.parameters()} == {("meta", torch.bfloat16)}


def test_it_prints_its_parts() -> None:
    assert (
        repr(build("parameter", SIDE_BY_SIDE, bias=True))
        == "ParameterProjection(in_features=5, q=6, k=4, v=2, bias=True)"
    )


@pytest.mark.parametrize("variant", ["separate", "parameter"])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("key", "shape"),
    [("qkv.weight", (90, 32)), ("qkv.weight", (96, 31)), ("qkv.bias", (90,)), ("proj.weight", (32, 1))],
)
def test_a_wrong_shape_gets_torchs_own_message(
    build_stock: BuildStock, variant: str, strict: bool, key: str, shape: tuple[int, ...]
) -> None:
    stock, ours = build_stock(), build_stock()
    zoo.swap_attention(ours, variant)
    state = stock.state_dict() | {f"blocks.1.attn.{key}": torch.zeros(shape)}
    with pytest.raises(RuntimeError) as wanted:
        stock.load_state_dict(state, strict=strict)
    with pytest.raises(RuntimeError) as got:
        ours.load_state_dict(state, strict=strict)
    assert str(got.value) == str(wanted.value)


@pytest.mark.parametrize("variant", ["separate", "parameter"])
def test_missing_and_unexpected_keys_are_named(build_stock: BuildStock, variant: str) -> None:
    model = build_stock("vit_no_bias")
    zoo.swap_attention(model, variant)
    state = build_stock("vit_no_bias").state_dict() | {"blocks.0.attn.qkv.bias": torch.zeros(96)}
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "blocks.0.attn.qkv.bias"'):
        model.load_state_dict(state)
    del state["blocks.0.attn.qkv.bias"], state["blocks.0.attn.qkv.weight"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "blocks.0.attn.qkv.to_q'):
        model.load_state_dict(state)


@pytest.mark.parametrize("variant", ["separate", "parameter"])
def test_assigned_tensors_become_contiguous_parameters_of_their_own(build_stock: BuildStock, variant: str) -> None:
    model, stock = build_stock(seed=1).to("meta"), build_stock()
    zoo.swap_attention(model, variant)
    state = stock.state_dict()
    model.load_state_dict(state, assign=True)
    child = model.get_submodule("blocks.0.attn.qkv")
    assert all(p.is_contiguous() and not p.is_meta for p in child.parameters())
    storages = {p.untyped_storage().data_ptr() for p in child.parameters()}
    assert len(storages) == 6
    assert torch.equal(child.weight, state["blocks.0.attn.qkv.weight"])  # type: ignore[arg-type]


def test_a_copy_loads_stock_weights_after_the_original_is_gone(build_stock: BuildStock, images: Tensor) -> None:
    model, stock = build_stock(seed=1), build_stock()
    zoo.swap_attention(model, "parameter")
    copied = copy.deepcopy(model)
    del model
    gc.collect()
    copied.load_state_dict(stock.state_dict(), strict=True)
    assert torch.equal(copied(images), stock(images))


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("dim", "rows"), [(64, 17), (192, 17), (192, 197), (384, 65), (768, 197)])
def test_raw_matrices_give_a_linears_bits_from_17_rows_up(dim: int, rows: int, threads: int) -> None:
    kept = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check_same_product(dim, rows, tolerance=0.0)
        check_same_product(dim, 5, tolerance=0.0 if threads == 1 else 1e-5)  # few rows: other sums, hence rounding
    finally:
        torch.set_num_threads(kept)


def check_same_product(dim: int, rows: int, tolerance: float) -> None:
    layout = Layout(dict.fromkeys("qkv", dim))
    linear = nn.Linear(dim, 3 * dim)
    raw = find_attention("parameter").build(ProjectionSpec(dim, layout))  # type: ignore[attr-defined]
    for kind in KINDS:
        fill_parts(raw, layout, kind, part_tensors(linear, layout, kind))
    x = torch.randn(2, rows, dim, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(raw(x), linear(x), rtol=0, atol=tolerance)
