from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zoo
from tests.zoo.auditing.layer import Layer

OUTSIDE = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
OUTSIDE_PARAMETER = nn.Parameter(OUTSIDE.clone())
OUTSIDE_ROW = torch.ones(4)
SCALAR = torch.tensor(2.0)
TURNED = torch.ones(4, dtype=torch.complex64)
ORDER = torch.arange(4).flip(0)


def probe(then: Callable[[Layer, Tensor], Tensor]) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Layer(then))
    report = zoo.audit(model, torch.optim.SGD(model.parameters(), lr=0.1), batch=torch.ones(2, 4))
    return [str(finding) for finding in report.findings]


def build_parameter(_: Layer, x: Tensor) -> Tensor:
    return x @ nn.Parameter(torch.ones(4, 4))


def build_leaf(layer: Layer, x: Tensor) -> Tensor:
    layer.weight = torch.ones(4, 4, requires_grad=True)
    return x @ layer.weight


@pytest.mark.parametrize("then", [build_parameter, build_leaf])
def test_parameter_built_in_forward_is_placed(then) -> None:
    (found,) = probe(then)
    assert found.startswith(
        "error: probe: 1: its forward builds a tensor of shape (4, 4) that requires a gradient, anew"
    )
    assert found.endswith("create it once, as an nn.Parameter in __init__")


def test_parameter_built_in_the_forward_of_the_model_itself_is_told_of_the_whole() -> None:
    torch.manual_seed(0)
    (found,) = zoo.audit(Layer(build_parameter), batch=torch.ones(2, 4)).findings
    assert (found.tensor, found.message.split(" of shape")[0]) == ("", "its forward builds a tensor")


def test_parameter_created_under_another_name_is_named_with_the_one_it_displaced() -> None:
    def rename(layer: Layer, x: Tensor) -> Tensor:
        layer.gain = nn.Parameter(torch.ones(4))
        return x * layer.gain

    (found,) = probe(rename)
    assert found.startswith("error: probe: 1.gain: is created anew in forward: no optimizer made before knows it")


def test_second_name_of_a_tie_that_forward_creates_anew_is_named() -> None:
    class Untied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            self.second.weight = nn.Parameter(self.first.weight.detach().clone())
            return self.second(self.first(x))

    (found,) = zoo.audit(Untied(), batch=torch.ones(2, 4)).errors
    assert (found.check, found.tensor) == ("probe", "second.weight")
    assert found.message.startswith("is created anew in forward: the optimizer steps the old one")


def write_data(layer: Layer, x: Tensor) -> Tensor:
    layer.linear.weight.data = torch.ones(4, 4)
    return x


def draw_again(layer: Layer, x: Tensor) -> Tensor:
    with torch.no_grad():
        layer.linear.bias.uniform_()
    return x


@pytest.mark.parametrize(("then", "name"), [(write_data, "1.linear.weight"), (draw_again, "1.linear.bias")])
def test_parameter_written_to_in_forward_is_named(then, name) -> None:
    (found,) = [line for line in probe(then) if "written" in line]
    assert found.startswith(f"error: probe: {name}: is written to in forward: what the optimizer does to it is lost")


def test_parameter_removed_in_forward_is_named() -> None:
    def remove(layer: Layer, x: Tensor) -> Tensor:
        layer.linear.bias = None
        return x

    (found,) = probe(remove)
    assert found.startswith("error: probe: 1.linear.bias: is removed by forward")


def test_parameter_kept_outside_of_the_model_is_placed_and_its_gradient_is_left_alone() -> None:
    OUTSIDE_PARAMETER.grad = torch.full((4, 4), 7.0)
    (found,) = probe(lambda _, x: x @ OUTSIDE_PARAMETER)
    assert found.startswith(
        "error: probe: 1: its forward uses a tensor of shape (4, 4) that requires a gradient and is no"
    )
    torch.testing.assert_close(OUTSIDE_PARAMETER.grad, torch.full((4, 4), 7.0), rtol=0, atol=0)


@pytest.mark.parametrize(
    "then",
    [
        lambda _, x: x @ OUTSIDE,
        lambda _, x: x @ OUTSIDE.t(),
        lambda _, x: x + torch.histogram(x.detach()[0], 4, weight=OUTSIDE_ROW).hist,
    ],
    ids=["itself", "a view", "by keyword"],
)
def test_plain_tensor_kept_outside_of_the_model_is_a_warning(then) -> None:
    (found,) = probe(then)
    assert found.startswith("warning: probe: 1: its forward uses a plain tensor of shape (4")
    assert "that the model does not hold (kept in a closure, a global or an object)" in found
    assert found.endswith("register_buffer it, or make it an nn.Parameter")


def test_complex_tensor_kept_outside_of_the_model_is_a_warning() -> None:
    (found,) = probe(lambda _, x: (x * TURNED).real)
    assert found.startswith("warning: probe: 1: its forward uses a plain tensor of shape (4,)")


def test_table_of_indices_kept_outside_of_the_model_is_no_fault() -> None:
    assert probe(lambda _, x: x[:, ORDER]) == []


def test_tensor_in_a_hook_is_seen_though_no_attribute_holds_it() -> None:
    model = nn.Linear(4, 4)
    gain = nn.Parameter(torch.ones(4))
    model.register_forward_hook(lambda _module, _inputs, output: output * gain)
    assert "its forward uses a tensor of shape (4,) that requires" in str(zoo.audit(model, batch=torch.ones(1, 4)))


@pytest.mark.parametrize(
    "then",
    [
        lambda _, x: x * SCALAR,
        lambda _, x: x * torch.tensor([1.0, 2.0, 3.0, 4.0]),
        lambda _, x: x + torch.from_numpy(np.ones(4, dtype=np.float32)),
        lambda _, x: x + torch.arange(4.0).to(x) + torch.randn_like(x),
        lambda layer, x: checkpoint(layer.linear, x, use_reentrant=False),
        lambda layer, x: checkpoint(layer.linear, x, use_reentrant=True),
        lambda layer, x: x @ layer.linear.weight.t() + layer.linear.weight.data[0],
        lambda _, x: torch.sparse.mm(torch.eye(4).to_sparse(), x.t()).t(),
    ],
    ids=["scalar", "constant", "numpy", "factories", "checkpoint", "reentrant", "views", "sparse"],
)
def test_what_forward_makes_for_itself_is_no_fault(then) -> None:
    assert probe(then) == []


def test_kernel_generated_from_parameters_in_each_forward_is_legitimate() -> None:
    class Generated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = nn.Linear(3, 16)

        def forward(self, x: Tensor) -> Tensor:
            self.kernel = self.generator(torch.ones(3)).view(4, 4)
            return x @ self.kernel

    model = Generated()
    for _ in range(2):  # after a forward pass the module keeps a tensor that has a graph
        report = zoo.audit(model, torch.optim.SGD(model.parameters(), lr=0.1), batch=torch.ones(2, 4))
        assert report.findings == ()
        model(torch.ones(2, 4))


def test_attribute_already_named_is_not_told_again_by_the_probe() -> None:
    model = Layer(lambda layer, x: x * layer.scale + layer.others[0](x))
    model.scale = torch.ones(4, requires_grad=True)
    model.others = [nn.Linear(4, 4)]
    checks = [finding.check for finding in zoo.audit(model, batch=torch.ones(2, 4)).findings]
    assert checks == ["registered", "registered"]


def test_buffers_of_a_hidden_module_are_not_told_again_by_the_probe() -> None:
    model = Layer(lambda layer, x: layer.others[0](x))
    model.others = [nn.BatchNorm1d(4)]
    assert [finding.check for finding in zoo.audit(model, batch=torch.ones(2, 4)).findings] == ["registered"]


def test_input_whose_gradient_forward_takes_has_one_in_the_copy() -> None:
    class Penalised(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            (slope,) = torch.autograd.grad(super().forward(x).square().sum(), x, create_graph=True)
            return slope

    model = Penalised(4, 4, bias=False)
    assert zoo.audit(model, batch=torch.ones(2, 4, requires_grad=True)).findings == ()


def test_input_that_requires_a_gradient_is_not_taken_for_a_parameter() -> None:
    batch = torch.ones(2, 4, requires_grad=True)
    assert zoo.audit(nn.Linear(4, 4), batch=batch).findings == ()
    assert batch.grad is None


def test_probe_runs_under_no_grad_as_outside_of_it() -> None:
    with torch.no_grad():
        assert zoo.audit(nn.Linear(4, 4), batch=torch.ones(2, 4)).findings == ()


def test_outputs_without_a_graph_are_left_aside() -> None:
    class Masked(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x > 0, super().forward(x)

    assert zoo.audit(Masked(4, 4), batch=torch.ones(2, 4)).findings == ()


def test_probe_runs_in_train_mode_whatever_mode_the_model_is_in() -> None:
    class Auxiliary(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) if self.training else x * 1.0

    model = nn.Sequential(nn.Linear(4, 4), Auxiliary(build_leaf)).eval()
    assert zoo.audit(model, batch=torch.ones(2, 4)).findings == ()


@pytest.mark.parametrize("kind", [tuple, list])
def test_outputs_in_a_tuple_or_a_list_reach_their_parameters(kind) -> None:
    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> object:
            return kind([self.one(x), self.other(x)])

    assert zoo.audit(Twins(), batch=torch.ones(2, 4)).findings == ()


@dataclass
class Output:
    logits: Tensor
    aux: dict[str, Tensor]


def test_outputs_in_a_dataclass_or_a_mapping_reach_their_parameters() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Output:
            return Output(self.one(x), {"aux": self.other(x)})

    assert zoo.audit(Two(), batch=torch.ones(2, 4)).findings == ()


def test_batch_may_be_a_mapping_of_forwards_keywords() -> None:
    model = nn.Bilinear(2, 3, 1)
    batch = {"input1": torch.ones(1, 2), "input2": torch.ones(1, 3)}
    assert zoo.audit(model, batch=batch).findings == ()
