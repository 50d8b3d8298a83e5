import copy

import pytest
import torch
from torch import nn

import zoo
from zoo.auditing.aliasing import check_ties


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
    [lambda w: w, lambda w: w.t(), lambda w: w[1:3], lambda w: w[2], lambda w: w.view(-1)[4:9], lambda w: w[:, :2]],
    ids=["whole", "transposed", "rows", "row", "middle", "first columns"],
)
def test_parameter_over_a_part_of_anothers_memory_is_a_warning(view) -> None:
    model = nn.ParameterDict({"w": torch.randn(4, 4)})
    model["part"] = nn.Parameter(view(model["w"].data))
    (found,) = told(model)
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
    row_between_others = nn.ParameterDict({"every_third": nn.Parameter(storage[::3]), "row": nn.Parameter(storage[1])})
    assert told(side_by_side) == told(interleaved) == told(row_between_others) == []


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


def test_buffers_over_one_memory_are_no_fault() -> None:
    model = nn.Linear(3, 3)
    model.register_buffer("mask", torch.ones(4, 4))
    model.register_buffer("rows", model.mask[:2])
    assert told(model) == []


@pytest.mark.parametrize(
    "build",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.empty(2, 3, device="meta"),
        lambda: torch.empty(0, 3),
    ],
    ids=["sparse", "meta", "empty"],
)
def test_tensors_without_dense_memory_are_not_compared(build) -> None:
    model = nn.ParameterDict({"a": nn.Parameter(build()), "b": nn.Parameter(build())})
    assert told(model) == []


def test_tie_of_a_module_with_its_own_child_is_told_by_the_tensors() -> None:
    model = nn.Linear(3, 3)
    model.child = nn.Linear(3, 3)
    model.child.weight, model.child.bias = model.weight, model.bias
    assert told(model) == [
        "note: tie: child.weight: is one tensor with weight, counted once",
        "note: tie: child.bias: is one tensor with bias, counted once",
    ]


def test_copies_are_told_from_tensors_that_begin_alike_and_told_of_the_first() -> None:
    draws = torch.randn(2, 4, 8)
    draws[:, 0] = 0.0  # as embeddings with a padding row begin
    model = nn.ParameterDict({"a": draws[0].clone(), "other": draws[1].clone()})
    assert told(model) == []
    model["b"], model["c"] = draws[0].clone(), draws[0].clone()
    assert [line.split(",")[0] for line in told(model)] == [
        "note: tie: b: is an equal copy of a",
        "note: tie: c: is an equal copy of a",
    ]


def test_equal_values_of_another_dtype_or_shape_are_no_copies() -> None:
    values = torch.arange(6.0)
    model = nn.ParameterDict({"a": values, "wide": values.double(), "row": values[None].clone()})
    assert told(model) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.complex64])
def test_copies_of_any_dtype_are_seen(dtype) -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).to(dtype)
    model = nn.ParameterDict({name: nn.Parameter(values.clone(), requires_grad=False) for name in "ab"})
    assert len(told(model)) == 1
