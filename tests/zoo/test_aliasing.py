import copy

import pytest
import torch
from torch import nn

import zoo
from zoo.aliasing import check_ties


def told(model: nn.Module) -> list[str]:
    return [str(finding) for finding in check_ties(model)]


@pytest.fixture
def two_layers() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"embed": nn.Linear(4, 3), "head": nn.Linear(4, 3)})


def copy_weight(source: nn.Linear, target: nn.Linear) -> None:
    """Tie two layers, thinks its author."""
    target.weight = nn.Parameter(source.weight.detach().clone())


def test_one_weight_in_two_layers_is_a_note_and_is_counted_once(two_layers) -> None:
    two_layers["head"].weight = two_layers["embed"].weight
    report = zoo.audit(two_layers, torch.optim.SGD(two_layers.parameters(), lr=0.1))
    assert [str(finding) for finding in report.findings] == [
        "note: tie: head.weight: is one tensor with embed.weight, counted once"
    ]
    assert report.parameters == 3


def test_function_that_makes_two_copies_of_one_is_told_from_a_tie(two_layers) -> None:
    copy_weight(two_layers["embed"], two_layers["head"])
    assert told(two_layers) == [
        "note: tie: head.weight: is an equal copy of embed.weight, not tied to it: two tensors that will part"
    ]


def test_deepcopy_of_the_whole_keeps_a_tie_and_of_one_layer_makes_a_copy(two_layers) -> None:
    two_layers["head"].weight = two_layers["embed"].weight
    assert "is one tensor with embed.weight" in told(copy.deepcopy(two_layers))[0]
    two_layers["head"] = copy.deepcopy(two_layers["embed"])
    assert told(two_layers) == [
        "note: tie: head: is an equal copy of embed, not tied to it, in 2 tensors: they will part"
    ]


def test_whole_modules_are_told_in_one_line() -> None:
    layer = nn.Linear(3, 3)
    assert told(nn.ModuleDict({"a": nn.Sequential(layer), "b": nn.Sequential(layer)})) == [
        "note: tie: b: shares 2 tensors with a, each counted once"
    ]


def test_one_dimensional_copies_count_and_constants_do_not() -> None:
    model = nn.ParameterDict({"a": torch.randn(5), "ones": torch.ones(5), "more_ones": torch.ones(5)})
    assert told(model) == []
    model["b"] = model["a"].detach().clone()
    assert [line.split(",")[0] for line in told(model)] == ["note: tie: b: is an equal copy of a"]


@pytest.mark.parametrize(
    "view",
    [lambda w: w, lambda w: w.t(), lambda w: w[1:3], lambda w: w[2], lambda w: w.view(-1)[4:9]],
    ids=["whole", "transposed", "rows", "row", "middle"],
)
def test_parameter_over_a_part_of_anothers_memory_is_a_warning(view) -> None:
    model = nn.ParameterDict({"w": torch.randn(4, 4)})
    model["part"] = nn.Parameter(view(model["w"].data))
    (found,) = [line for line in told(model) if line.startswith("warning")]
    assert found.startswith(
        "warning: tie: part: is another nn.Parameter over w's memory: the optimizer would step it twice"
    )


def test_every_part_of_a_whole_is_named() -> None:
    model = nn.Module()
    model.qkv = nn.Parameter(torch.randn(12, 4))
    model.q, model.k, model.v = map(nn.Parameter, model.qkv.data.chunk(3))
    assert [line.split(": ")[2] for line in told(model)] == ["q", "k", "v"]


def test_parts_of_one_storage_that_do_not_meet_are_no_fault() -> None:
    storage = torch.randn(12, 4)
    side_by_side = nn.ParameterDict({part: nn.Parameter(w) for part, w in zip("qkv", storage.chunk(3), strict=True)})
    interleaved = nn.ParameterDict({part: nn.Parameter(storage[i::3]) for i, part in enumerate("qkv")})
    assert told(side_by_side) == told(interleaved) == []


def test_tie_through_data_is_told_from_a_real_one(two_layers) -> None:
    two_layers["head"].weight.data = two_layers["embed"].weight.data
    assert told(two_layers)[0].startswith(
        "warning: tie: head.weight: is another nn.Parameter over embed.weight's memory"
    )


def test_buffer_over_a_parameters_memory_is_a_warning() -> None:
    model = nn.Linear(3, 3)
    model.register_buffer("average", model.weight.data)
    assert told(model) == [
        "warning: tie: average: is a buffer over the memory of the parameter weight and changes with it: register a "
        ".clone()"
    ]
    model.average = model.weight.data.clone()
    assert told(model) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.complex64])
def test_copies_of_any_dtype_are_seen(dtype) -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).to(dtype)
    model = nn.ParameterDict({name: nn.Parameter(values.clone(), requires_grad=False) for name in "ab"})
    assert len(told(model)) == 1
