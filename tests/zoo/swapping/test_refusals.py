from collections.abc import Callable, Iterator

import pytest
import timm
import torch
from timm.layers.attention import Attention
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import zoo
from zoo.errors import SwapError

BuildStock = Callable[..., nn.Module]
BytesOf = Callable[[nn.Module], dict[str, bytes]]


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Tagged(Tensor):
    """A tensor subclass, as quantised and distributed tensors are."""


class TimmLike(Attention):
    """A class of its own, though timm's by descent."""


class Unnamed(Attention):
    """Attention by descent only, not by name."""


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def linear(model: nn.Module) -> nn.Linear:
    child = model.get_submodule("blocks.2.attn.qkv")
    assert isinstance(child, nn.Linear)
    return child


def with_subclass(model: nn.Module) -> None:
    model.get_submodule("blocks.2.attn").qkv = Scaled(32, 96)


def with_own_forward(model: nn.Module) -> None:
    child = linear(model)
    child.forward = lambda x: 2 * nn.functional.linear(x, child.weight)  # type: ignore[method-assign]


def with_tensor_subclass(model: nn.Module) -> None:
    linear(model).weight = nn.Parameter(linear(model).weight.detach().as_subclass(Tagged))


def with_double_bias(model: nn.Module) -> None:
    linear(model).bias.data = linear(model).bias.data.double()


def with_one_storage_twice(model: nn.Module) -> None:
    model.get_submodule("blocks.1.attn.qkv").weight = nn.Parameter(linear(model).weight.data)


def with_another_class(model: nn.Module) -> None:
    model.get_submodule("blocks.1").attn = nn.MultiheadAttention(32, 2)


def with_subclass_of_timms(model: nn.Module) -> None:
    model.get_submodule("blocks.1").attn = TimmLike(32, 2)


def with_unnamed_subclass(model: nn.Module) -> None:
    model.get_submodule("blocks.1").attn = Unnamed(32, 2)


QKV = r"blocks\.2\.attn\.qkv"
PLANTED: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "forward hook": (lambda m: linear(m).register_forward_hook(lambda *_: None), f"{QKV}: has forward hooks"),
    "pre hook": (lambda m: linear(m).register_forward_pre_hook(lambda *_: None), f"{QKV}: has forward pre hooks"),
    "backward hook": (lambda m: linear(m).register_full_backward_hook(lambda *_: None), f"{QKV}: has backward hooks"),
    "backward pre hook": (
        lambda m: linear(m).register_full_backward_pre_hook(lambda *_: None),
        f"{QKV}: has backward pre hooks",
    ),
    "tensor hook": (lambda m: linear(m).weight.register_hook(lambda g: g), rf"{QKV}\.weight: has backward hooks"),
    "accumulate hook": (
        lambda m: linear(m).bias.register_post_accumulate_grad_hook(lambda _: None),
        rf"{QKV}\.bias: has post accumulate grad hooks",
    ),
    "subclass": (with_subclass, f"{QKV}: cannot swap Scaled"),
    "weight norm": (lambda m: parametrizations.weight_norm(linear(m)), f"{QKV}: cannot swap ParametrizedLinear"),
    "pruned": (lambda m: prune.identity(linear(m), "weight"), f"{QKV}: has forward pre hooks"),
    "own forward": (with_own_forward, f"{QKV}: has a forward of its own"),
    "further buffer": (lambda m: linear(m).register_buffer("mask", torch.ones(1)), rf"{QKV}\.mask: has a tensor"),
    "further child": (lambda m: linear(m).add_module("lora", nn.Linear(2, 2)), rf"{QKV}\.lora\.weight: has a tensor"),
    "tensor subclass": (with_tensor_subclass, rf"{QKV}\.weight: has the class Tagged"),
    "two dtypes": (with_double_bias, rf"{QKV}: holds parameters of .*float32.*float64"),
    "one storage twice": (with_one_storage_twice, r"1\.attn\.qkv\.weight is tied to blocks\.2\.attn\.qkv\.weight"),
    "another class": (with_another_class, r"blocks\.1\.attn: cannot swap MultiheadAttention, no row"),
    "subclass of timm's": (with_subclass_of_timms, r"blocks\.1\.attn: cannot swap TimmLike, no row"),
    "unnamed subclass": (with_unnamed_subclass, r"blocks\.1\.attn: cannot swap Unnamed, no row"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_what_a_swap_would_lose_is_refused_and_nothing_changes(
    build_stock: BuildStock, bytes_of: BytesOf, fault: str
) -> None:
    model = build_stock()
    plant, message = PLANTED[fault]
    plant(model)
    before, modules = bytes_of(model), [id(module) for module in model.modules()]
    for init in (None, "normal"):
        with pytest.raises(SwapError, match=message):
            zoo.swap_attention(model, "parameter", init=init, seed=1)
        assert bytes_of(model) == before
        assert [id(module) for module in model.modules()] == modules


def test_a_changed_projection_is_refused_on_the_way_back(build_stock: BuildStock) -> None:
    model = build_stock()
    zoo.swap_attention(model, "parameter")
    parametrize.register_parametrization(model.get_submodule("blocks.1.attn.qkv"), "to_q", Double())
    with pytest.raises(SwapError, match=r"blocks\.1\.attn\.qkv: cannot swap ParametrizedParameterProjection"):
        zoo.restore_attention(model)
    model = build_stock()
    zoo.swap_attention(model, "separate")
    inner = model.get_submodule("blocks.1.attn.qkv.to_q")
    handle = inner.register_forward_hook(lambda *_: None)
    with pytest.raises(SwapError, match=r"blocks\.1\.attn\.qkv\.to_q: has forward hooks"):
        zoo.restore_attention(model)
    handle.remove()
    parametrizations.weight_norm(inner)
    with pytest.raises(SwapError, match=r"blocks\.1\.attn\.qkv\.to_q: cannot swap ParametrizedLinear"):
        zoo.restore_attention(model)


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        ("resnet10t", "ResNet has no attention that can be swapped"),
        ("coatnet_pico_rw_224", r"stages\.2\.blocks\.0\.attn: cannot swap Attention2d, its projections are 1x1 conv"),
    ],
)
def test_backbones_without_rows_are_refused(backbone: str, message: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(backbone)
    before = list(model.state_dict())
    with pytest.raises(SwapError, match=message):
        zoo.swap_attention(model, "parameter")
    assert list(model.state_dict()) == before


def test_a_mixed_model_swaps_and_restores_by_name(build_stock: BuildStock, bytes_of: BytesOf) -> None:
    model = build_stock()
    with_another_class(model)
    before = bytes_of(model)
    assert zoo.swap_attention(model, "parameter", names="*").modules == ("blocks.0.attn", "blocks.2.attn")
    zoo.restore_attention(model)
    assert bytes_of(model) == before


@pytest.fixture
def one_rank_group() -> Iterator[None]:
    """Stand up a gloo group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank_group")
def test_ddp_is_refused_whole_and_in_part(build_stock: BuildStock) -> None:
    wrapped = nn.parallel.DistributedDataParallel(build_stock())
    with pytest.raises(SwapError, match="the model: DistributedDataParallel is a wrapper"):
        zoo.swap_attention(wrapped, "parameter")
    with pytest.raises(SwapError, match=r"^0: DistributedDataParallel is a wrapper"):
        zoo.swap_attention(nn.Sequential(wrapped), "parameter", names="*")


def test_a_compiled_model_is_refused_whole_and_in_part(build_stock: BuildStock) -> None:
    model = build_stock()
    with pytest.raises(SwapError, match="the model: OptimizedModule is a wrapper"):
        zoo.swap_attention(torch.compile(model, backend="eager"), "parameter")
    blocks = model.get_submodule("blocks")
    blocks[1] = torch.compile(blocks[1], backend="eager")  # type: ignore[operator,index]
    with pytest.raises(SwapError, match=r"blocks\.1: OptimizedModule is a wrapper"):
        zoo.swap_attention(model, "parameter")
