"""Where the probe says that a tensor was read or built; what it says of it is in test_probes.py."""

import torch
from torch import Tensor, nn

import zoo
from tests.zoo.auditing.layer import Layer

OUTSIDE = torch.ones(4, 4)


def build_parameter(_: Layer, x: Tensor) -> Tensor:
    return x @ nn.Parameter(torch.ones(4, 4))


def test_tensor_from_outside_is_placed_where_it_is_first_read() -> None:
    model = nn.Sequential(Layer(lambda _, x: x @ OUTSIDE), Layer(lambda _, x: x @ OUTSIDE))
    (found,) = zoo.audit(model, batch=torch.ones(2, 4)).findings
    assert found.tensor == "0"


def test_parameter_built_in_memory_that_was_free_again_is_placed_where_it_was_built() -> None:
    def churn(_: Layer, x: Tensor) -> Tensor:
        return x + sum(torch.ones(4) for _ in range(64)) + torch.stack([torch.ones(4) for _ in range(64)]).mean()

    model = nn.Sequential(Layer(churn), Layer(build_parameter))
    (found,) = zoo.audit(model, batch=torch.ones(2, 4)).findings
    assert found.tensor == "1"


def test_parameter_built_in_one_module_and_read_in_another_is_placed_where_it_was_built() -> None:
    built = []

    def build(_: Layer, x: Tensor) -> Tensor:
        built.append(nn.Parameter(torch.ones(4, 4)))
        return x

    model = nn.Sequential(Layer(build), Layer(lambda _, x: x @ built[-1].t()))
    (found,) = zoo.audit(model, batch=torch.ones(2, 4)).findings
    assert (found.tensor, found.message.split(" of shape")[0]) == ("0", "its forward builds a tensor")
