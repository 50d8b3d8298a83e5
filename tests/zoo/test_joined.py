"""A weight that is stored in parts, written to from outside as if it were nn.Linear's own."""

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

from zoo.errors import ZooError
from zoo.joined import Joined
from zoo.layout import Layout
from zoo.projections import KINDS, Projection, ProjectionSpec, fill_parts, part_tensors
from zoo.registry import find_attention

LAYOUTS = {
    "fused": Layout({"q": 6, "k": 4, "v": 2}),
    "by_head": Layout({"q": 6, "k": 4, "v": 2}, num_heads=2),
    "single": Layout({"out": 12}),
}
PAIRS = [(v, name) for v in ("separate", "parameter") for name in LAYOUTS if (v, name) != ("separate", "single")]
Pair = tuple[Projection, nn.Linear]


def build_pair(variant: str = "parameter", layout: str = "fused") -> Pair:
    """Return a projection and the nn.Linear that it stands for."""
    linear = nn.Linear(5, 12)
    nn.init.normal_(linear.weight, generator=torch.Generator().manual_seed(1))
    nn.init.normal_(linear.bias, generator=torch.Generator().manual_seed(2))
    module = find_attention(variant).build(ProjectionSpec(5, LAYOUTS[layout]))  # type: ignore[attr-defined]
    assert isinstance(module, Projection)
    for kind in KINDS:
        fill_parts(module, module.layout, kind, part_tensors(linear, module.layout, kind))
    return module, linear


@pytest.fixture(params=PAIRS, ids="-".join)
def pair(request: pytest.FixtureRequest) -> Pair:
    return build_pair(*request.param)


def check_same(pair: Pair) -> None:
    """Compare what is stored, and what forward makes of it, with nn.Linear's, bit for bit."""
    module, linear = pair
    for kind in KINDS:
        wanted = part_tensors(linear, module.layout, kind)
        for part, tensor in module.part_tensors(kind).items():
            assert torch.equal(tensor, wanted[part]), (kind, part)
    x = torch.randn(17, 5, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(module(x), linear(x))


def under_data(write: Callable[[Tensor], object]) -> Callable[[nn.Linear], object]:
    return lambda module: write(module.weight.data)


def no_grad(write: Callable[[nn.Linear], object]) -> Callable[[nn.Linear], object]:
    return lambda module: torch.no_grad()(write)(module)


ONES = torch.ones(12, 5)
WRITES: dict[str, Callable[[nn.Linear], object]] = {
    "xavier": lambda module: nn.init.xavier_uniform_(module.weight),
    "trunc_normal": lambda module: nn.init.trunc_normal_(module.weight, std=0.02),
    "orthogonal": lambda module: nn.init.orthogonal_(module.weight),
    "kaiming": lambda module: nn.init.kaiming_uniform_(module.weight, a=5**0.5),
    "constant": lambda module: nn.init.constant_(tensor=module.weight, val=0.5),
    "bias_zeros": lambda module: nn.init.zeros_(module.bias),
    "bias_normal": lambda module: nn.init.normal_(module.bias, std=1e-6),
    "reset_parameters": lambda module: module.reset_parameters(),
    "copy": no_grad(lambda module: module.weight.copy_(ONES)),
    "div": no_grad(lambda module: module.weight.div_(3)),
    "chain": no_grad(lambda module: module.weight.mul_(3).add_(1)),
    "add_operator": no_grad(lambda module: module.weight.__iadd__(1)),
    "setitem": no_grad(lambda module: module.weight.__setitem__(slice(2, 9), 0.25)),
    "setitem_mask": no_grad(lambda module: module.weight.__setitem__(module.weight > 0, 0.25)),
    "slice": no_grad(lambda module: module.weight[3:8].zero_()),
    "slice_of_slice": no_grad(lambda module: module.weight[3:8][:, 1:3].fill_(2)),
    "view": no_grad(lambda module: module.weight.view(3, 4, 5)[1].mul_(2)),
    "transposed": no_grad(lambda module: module.weight.t().mul_(2)),
    "chunk": no_grad(lambda module: module.weight.chunk(3)[1].mul_(2)),
    "unbind": no_grad(lambda module: module.weight.unbind()[7].mul_(2)),
    "out": no_grad(lambda module: torch.mul(module.weight, 2, out=module.weight)),
    "foreach": no_grad(lambda module: torch._foreach_mul_([module.weight, module.bias], 2.0)),
    "where": no_grad(lambda module: module.weight.masked_fill_(module.weight > 0, -1)),
    "bias_copy": no_grad(lambda module: module.bias.copy_(torch.arange(12.0))),
    "data_copy": under_data(lambda data: data.copy_(ONES)),
    "data_normal": under_data(lambda data: data.normal_(0, 0.02)),
    "data_slice": under_data(lambda data: data[:4].uniform_()),
    "data_setitem": under_data(lambda data: data.__setitem__((slice(None), 2), 7)),
    "detach": lambda module: module.weight.detach().mul_(2),
    "clip": no_grad(lambda module: module.weight.clamp_(-0.1, 0.1)),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_lands_as_in_linear_bit_for_bit(pair: Pair, name: str) -> None:
    before = [parameter.detach().clone() for parameter in pair[0].parameters()]
    states = []
    for module in pair:
        torch.manual_seed(4)
        WRITES[name](module)
        states.append(torch.get_rng_state())
    # a draw into a slice fills it in the order of memory, which is another one for raw matrices
    if name == "data_slice" and pair[0].transposed:
        assert pair[0].weight[:4].min() >= 0
        return
    check_same(pair)
    assert torch.equal(*states)
    assert any(not torch.equal(old, new) for old, new in zip(before, pair[0].parameters(), strict=True))


def test_a_late_write_keeps_what_came_between(pair: Pair) -> None:
    weights = [module.weight for module in pair]
    views = [weight.detach()[2:] for weight in weights]
    for module in pair:
        with torch.no_grad():
            module.weight.add_(1)
    with torch.no_grad():
        for weight, view in zip(weights, views, strict=True):
            weight.mul_(2)
            view.sub_(3)
    check_same(pair)


def test_what_is_computed_from_it_is_no_way_in(pair: Pair) -> None:
    module = pair[0]
    weight = module.weight
    with torch.no_grad():
        copies = [weight.clone(), weight * 1, weight.float().clone(), copy.deepcopy(weight), weight.new_zeros(12, 5)]
    copies.append(pickle.loads(pickle.dumps(weight)))
    for tensor in copies:
        assert type(tensor) is Tensor
        tensor.detach().zero_()
    assert copies[3].is_leaf
    assert copies[3].requires_grad
    check_same(pair)


def test_as_a_source_it_is_an_ordinary_tensor_of_autograd(pair: Pair) -> None:
    gradients = []
    for module in pair:
        target = torch.zeros(12, 5)
        target.copy_(module.weight)
        (target.square().sum() + F.linear(torch.ones(2, 5), module.weight, module.bias).square().sum()).backward()
        gradients.append(
            part_tensors(module, pair[0].layout, "weight")
            if module is pair[1]
            else {part: pair[0].part_parameter(part, "weight") for part in pair[0].layout.parts}
        )
    wanted = pair[0].layout.split(pair[1].weight.grad)  # type: ignore[arg-type]
    for part, parameter in gradients[0].items():
        assert parameter is not None
        assert parameter.grad is not None
        got = parameter.grad.t() if pair[0].transposed else parameter.grad
        torch.testing.assert_close(got, wanted[part])


def test_a_write_that_autograd_would_follow_gets_torchs_error(pair: Pair) -> None:
    for module in pair:
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place"):
            module.weight.mul_(2)
        with pytest.raises(RuntimeError, match="requires grad"):
            module.weight[2:].mul_(2)
    check_same(pair)
    for module in pair:
        module.requires_grad_(False)
        module.weight.mul_(2)  # frozen: stock torch lets it pass
    check_same(pair)


REFUSED: dict[str, Callable[[Tensor], object]] = {
    "setting an attribute of it": lambda weight: setattr(weight, "data", torch.zeros(12, 5)),
    "requires_grad_": lambda weight: weight.requires_grad_(False),
    "register_hook": lambda weight: weight.register_hook(lambda grad: grad),
    "share_memory_": lambda weight: weight.share_memory_(),
    "resize_": lambda weight: weight.detach().resize_(3, 3),
    "t_": lambda weight: weight.detach().t_(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_forgotten_is_refused(pair: Pair, name: str) -> None:
    with pytest.raises(ZooError, match=rf"^{name} would be lost on a weight that is joined .*to_q, to_k, to_v"):
        REFUSED[name](pair[0].weight)
    with pytest.raises(ZooError, match="would be lost"):
        nn.Parameter(pair[0].weight)  # a second owner of the same memory, which there is not
    check_same(pair)


def test_numpy_cannot_write_to_a_copy() -> None:
    module, linear = build_pair()
    array = module.weight.detach().numpy()
    assert np.array_equal(array, linear.weight.detach().numpy())
    with pytest.raises(ValueError, match="read-only"):
        array[0, 0] = 1
    single, _ = build_pair(layout="single")
    single.weight.detach().numpy()[0, 0] = 5  # one raw matrix is seen as it is stored
    assert single.get_parameter("projection")[0, 0] == 5


def test_a_computed_part_is_read_and_not_written_to() -> None:
    module, linear = build_pair()
    prune.random_unstructured(module, "to_q", amount=0.5)
    assert (module.weight[:6] == 0).sum() == 15
    with pytest.raises(ZooError, match=r"^to_q is no parameter of ParameterProjection now: remove what computes it"):
        nn.init.zeros_(module.weight)
    assert torch.equal(module.get_parameter("to_q_orig"), linear.weight[:6].t())
    assert torch.equal(module.weight[6:], linear.weight[6:])


def test_a_write_to_a_weight_on_meta_writes_nowhere() -> None:
    module = find_attention("parameter").build(  # type: ignore[attr-defined]
        ProjectionSpec(5, LAYOUTS["fused"], device=torch.device("meta"))
    )
    nn.init.normal_(module.weight)
    assert all(parameter.is_meta for parameter in module.parameters())


def test_a_stored_parameter_is_given_as_it_is() -> None:
    module, _ = build_pair(layout="single")
    assert module.bias is module.get_parameter("projection_bias")
    assert type(module.weight) is Joined
