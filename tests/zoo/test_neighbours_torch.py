"""What torch does to any model, it does to a swapped one: as to the stock model, bit for bit unless it says why."""

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

import zoo
from tests.zoo.families import (
    FAMILIES,
    SLOW,
    VARIANTS,
    as_stock,
    build_images,
    build_pair,
    check_alike,
)
from zoo.errors import ZooError

pytestmark = [
    pytest.mark.parametrize("variant", VARIANTS),
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),  # timm's RmsNorm, stock too
]
having = partial(pytest.mark.parametrize, "family")
every_family = having([pytest.param(f, marks=pytest.mark.slow) if f in SLOW else f for f in FAMILIES])
few = having(["vit", "eva", "swin_v2", "hybrid"])


@every_family
def test_autocast_to_bfloat16(family: str, variant: str) -> None:
    def train(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(build_images(family))
        logits.float().square().sum().backward()
        return logits, as_stock(model, lambda parameter: parameter.grad)

    check_alike(family, variant, train, tolerance=2e-2 if family == "levit" else None)  # one bfloat16 digit


@having(["vit", "eva", "beit"])
def test_autocast_to_float16(family: str, variant: str) -> None:
    def infer(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16), torch.no_grad():
            return model(build_images(family))  # type: ignore[no-any-return]

    check_alike(family, variant, infer)


# a raw matrix's product is summed in another order in float64: a few units in the last place
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.0), ("float16", 0.0), ("float64", 1e-14)])
@every_family
def test_models_of_another_dtype(family: str, variant: str, dtype: str, tolerance: float) -> None:
    kind = getattr(torch, dtype)
    if family == "levit" and dtype != "float64":
        tolerance = 2e-2
    check_alike(family, variant, lambda model: model.to(kind)(build_images(family).to(kind)), tolerance=tolerance)


@every_family
def test_channels_last(family: str, variant: str) -> None:
    images = build_images(family).contiguous(memory_format=torch.channels_last)
    check_alike(family, variant, lambda model: model.to(memory_format=torch.channels_last)(images))


@every_family
def test_deepcopy_shares_nothing(family: str, variant: str) -> None:
    def copied(model: nn.Module) -> Tensor:
        other = copy.deepcopy(model)
        for parameter in model.parameters():
            parameter.data.zero_()
        return other(build_images(family))  # type: ignore[no-any-return]

    check_alike(family, variant, copied)


@few
def test_moves_over_meta_and_shared_memory(family: str, variant: str) -> None:
    def move(model: nn.Module) -> Tensor:
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        empty = model.to("meta").to_empty(device="cpu")
        empty.load_state_dict(state)
        for name, buffer in empty.named_buffers():
            buffer.copy_(buffers[name])
        empty.share_memory()
        assert all(parameter.is_shared() for parameter in empty.parameters())
        return empty(build_images(family))  # type: ignore[no-any-return]

    check_alike(family, variant, move)


@having(["vit", "eva"])
def test_a_block_under_checkpoint(family: str, variant: str) -> None:
    def train(model: nn.Module) -> dict[str, Tensor]:
        tokens = torch.ones(2, 17, 32, requires_grad=True)
        block = model.get_submodule("blocks.0")
        checkpoint(block, tokens, use_reentrant=False).square().sum().backward()
        return as_stock(block, lambda parameter: parameter.grad)

    check_alike(family, variant, train)


@having(["vit", "eva", "beit", "swin_v2"])
def test_functional_call_and_grad(family: str, variant: str) -> None:
    images = build_images(family)

    def loss(parameters: dict[str, Tensor], model: nn.Module) -> Tensor:
        return functional_call(model, parameters, (images,)).square().sum()  # type: ignore[no-any-return]

    def differentiate(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
        parameters = {name: parameter.detach() * 1.1 for name, parameter in model.named_parameters()}
        slopes = grad(loss)(parameters, model)
        named = {id(parameter): slopes[name] for name, parameter in model.named_parameters()}
        return loss(parameters, model), as_stock(model, lambda parameter: named[id(parameter)])

    check_alike(family, variant, differentiate)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@having(["vit", "eva"])
def test_per_sample_gradients_by_vmap(family: str, variant: str) -> None:
    images = build_images(family)

    def differentiate(model: nn.Module) -> dict[str, Tensor]:
        def loss(parameters: dict[str, Tensor], image: Tensor) -> Tensor:
            return functional_call(model, parameters, (image[None],)).square().sum()  # type: ignore[no-any-return]

        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        slopes = vmap(grad(loss), in_dims=(None, 0))(parameters, images)
        named = {id(parameter): slopes[name][1] for name, parameter in model.named_parameters()}
        return as_stock(model, lambda parameter: named[id(parameter)])

    check_alike(family, variant, differentiate, tolerance=1e-5)  # batched products sum in another order


@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning", "ignore:.torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@having(["vit", "eva", "beit", "swin_v2"])
def test_jit_trace(family: str, variant: str) -> None:
    images = build_images(family)
    check_alike(family, variant, lambda model: torch.jit.trace(model.requires_grad_(False), images)(images))  # type: ignore[no-untyped-call]


@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning", "ignore:.torch.jit:DeprecationWarning")
@few
def test_jit_script_is_refused_and_changes_nothing(family: str, variant: str) -> None:
    ours, stock = build_pair(family, variant)
    before = list(ours.modules())
    wanted = r"^torch\.jit\.script cannot compile \w+Projection: call restore_attention\(model\) first.*torch\.export"
    with pytest.raises(ZooError, match=wanted):
        torch.jit.script(ours)
    assert list(ours.modules()) == before
    assert torch.equal(ours(build_images(family)), stock(build_images(family)))


@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning", "ignore:.torch.jit:DeprecationWarning")
@pytest.mark.slow
def test_jit_script_compiles_what_was_restored(variant: str) -> None:
    ours, _ = build_pair("vit", variant)
    zoo.restore_attention(ours)
    torch.testing.assert_close(torch.jit.script(ours)(build_images("vit")), ours(build_images("vit")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "strict"), [("vit", True), ("vit", False), ("eva", False), ("swin_v2", False), ("hybrid", False)]
)
def test_export(family: str, variant: str, strict: bool) -> None:
    images = build_images(family)

    def export(model: nn.Module) -> Tensor:
        return torch.export.export(model, (images,), strict=strict).module()(images)  # type: ignore[no-any-return]

    check_alike(family, variant, export, tolerance=1e-6)  # decomposed kernels may round elsewhere


@pytest.mark.slow
@having(["vit", "eva", "swin_v2"])
def test_compile_takes_one_graph_and_never_a_second(family: str, variant: str) -> None:
    images = build_images(family)
    graphs = []

    def count(graph: torch.fx.GraphModule, _: list[Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    def compiled(model: nn.Module) -> tuple[Tensor, Tensor]:
        torch.compiler.reset()
        graphs.clear()
        fast = torch.compile(model, backend=count, fullgraph=True)
        first = fast(images)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        second = fast(images)
        assert len(graphs) == 1
        return first, second

    check_alike(family, variant, compiled, tolerance=1e-6)  # dynamo's own einsum and means may round elsewhere
    torch.compiler.reset()
