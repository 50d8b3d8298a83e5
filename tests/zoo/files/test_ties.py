import pytest
import torch
from torch import nn

from zoo.files.ties import find_ties, tie


def pair() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def test_find_ties_names_the_further_name() -> None:
    model = pair()
    assert find_ties(model.state_dict()) == {}
    model[1].weight = model[0].weight
    assert find_ties(model.state_dict()) == {"1.weight": "0.weight"}


def test_parts_of_one_storage_are_no_tie() -> None:
    flat = torch.zeros(8)
    assert find_ties({"a": flat[:4], "b": flat[4:], "empty": torch.zeros(0), "empty2": torch.zeros(0)}) == {}


@pytest.mark.parametrize("other", [torch.Tensor.t, lambda w: w[:2], lambda w: w.view(16)])
def test_overlap_that_is_no_tie_is_refused(other: object) -> None:
    weight = torch.zeros(4, 4)
    with pytest.raises(ValueError, match=r"(a and b|b and a) share memory"):
        find_ties({"a": weight, "b": other(weight)})  # type: ignore[operator]


def test_tie_makes_one_parameter_of_two() -> None:
    model = pair()
    tie(model, {"1.weight": "0.weight"})
    assert model[1].weight is model[0].weight
    assert len(list(model.parameters())) == 3


def test_tie_refuses_a_model_that_ties_more() -> None:
    model = pair()
    model[1].weight = model[0].weight
    with pytest.raises(
        ValueError, match=r"1\.weight and 0\.weight are one tensor in this model, but were saved as two"
    ):
        tie(model, {})


def test_tie_refuses_a_parameter_with_a_buffer() -> None:
    model = pair()
    model.register_buffer("b", torch.zeros(4))
    with pytest.raises(ValueError, match=r"cannot tie b to 0\.bias"):
        tie(model, {"b": "0.bias"})
