"""The checks of a model and its optimizer as they stand; what the report makes of them is in test_auditing.py."""

import copy

import pytest
import torch
from torch import nn

import zoo


def told(report, severity: str = "error") -> list[str]:
    return [str(finding) for finding in report.findings if finding.severity == severity]


@pytest.fixture
def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))


def test_first_parameters_frozen_by_hand_with_the_optimizer_over_the_rest_are_named_until_frozen_by_name(
    layers,
) -> None:
    parameters = list(layers.parameters())
    for parameter in parameters[:3]:
        parameter.requires_grad = False
    optimizer = torch.optim.SGD(parameters[3:], lr=0.1)
    errors = told(zoo.audit(layers, optimizer))
    assert [error.split(": ")[1:3] for error in errors] == [
        ["requires_grad", "0.weight"],
        ["requires_grad", "0.bias"],
        ["requires_grad", "1.weight"],
    ]
    assert "no freeze pattern named it: zoo.freeze it by name, or zoo.unfreeze it" in errors[0]
    zoo.freeze(layers, ["0", "1.weight"])
    assert zoo.audit(layers, optimizer).findings == ()


def test_parameter_unfrozen_after_the_optimizer_was_made_is_named(layers) -> None:
    zoo.freeze(layers, "0")
    optimizer = torch.optim.SGD([p for p in layers.parameters() if p.requires_grad], lr=0.1)
    zoo.unfreeze(layers, "0.bias")
    assert told(zoo.audit(layers, optimizer)) == [
        "error: optimizer: 0.bias: is trainable and in no optimizer group: make the optimizer from the model as it is "
        "now, or freeze it"
    ]


def test_freeze_that_a_replacement_undid_is_a_warning(layers) -> None:
    zoo.freeze(layers, "2")
    layers[2] = nn.Linear(4, 5)
    found = told(zoo.audit(layers), "warning")
    assert [line.split(": ")[2] for line in found] == ["2.weight", "2.bias"]
    assert "was frozen by name and is trainable: was it replaced since" in found[0]


def test_parameter_of_integers_cannot_train_and_is_no_fault(layers) -> None:
    layers.codes = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    assert zoo.audit(layers).findings == ()


def test_complex_parameter_that_nobody_froze_is_named(layers) -> None:
    layers.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64), requires_grad=False)
    assert [error.tensor for error in zoo.audit(layers).errors] == ["phase"]


def test_frozen_parameter_that_keeps_a_gradient_is_a_warning(layers) -> None:
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)
    layers(torch.ones(1, 4)).sum().backward()
    zoo.freeze(layers, "2.bias")
    (found,) = told(zoo.audit(layers, optimizer), "warning")
    assert found.startswith("warning: optimizer: 2.bias: is frozen, but holds a gradient from before")
    optimizer.zero_grad()
    assert told(zoo.audit(layers, optimizer), "warning") == []


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_parameter_twice_in_one_group_is_an_error(layers) -> None:
    optimizer = torch.optim.SGD([*layers.parameters(), layers[0].bias], lr=0.1)
    assert told(zoo.audit(layers, optimizer)) == [
        "error: optimizer: 0.bias: is held 2 times, in group 0 and group 0: each step would move it so often"
    ]


def test_tied_parameter_that_the_optimizer_holds_under_one_name_is_no_fault() -> None:
    model = nn.ModuleDict({"embed": nn.Linear(3, 3, bias=False), "head": nn.Linear(3, 3, bias=False)})
    model["head"].weight = model["embed"].weight
    assert told(zoo.audit(model, torch.optim.SGD(model["head"].parameters(), lr=0.1))) == []


def test_optimizer_over_a_copy_of_the_model_holds_only_orphans(layers) -> None:
    report = zoo.audit(layers, torch.optim.SGD(copy.deepcopy(layers).parameters(), lr=0.1))
    assert len(report.errors) == 12
    assert "(is it 2.weight before that was replaced?)" in str(report)


def test_orphan_that_may_be_one_of_two_is_not_guessed(layers) -> None:
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    layers[0], layers[1] = nn.Linear(4, 4), nn.Linear(4, 4)
    report = zoo.audit(layers, optimizer)
    assert len(report.errors) == 8
    assert "is it" not in str(report)


def test_orphan_is_named_as_the_snapshot_knew_it(layers) -> None:
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    before = zoo.snapshot(layers, optimizer)
    layers[2] = nn.Linear(4, 5)
    orphans = [error for error in zoo.audit(layers, optimizer, before=before).errors if "is held by" in error.message]
    assert [error.tensor for error in orphans] == ["2.weight", "2.bias"]


def test_strided_parameter_is_an_error_with_its_strides() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(4, 8)[:, ::2])
    assert told(zoo.audit(model)) == [
        "error: contiguous: weight: is not contiguous (shape (4, 4), strides (8, 2)), which safetensors refuses "
        "to save; store its .contiguous()"
    ]


def test_expanded_parameter_is_an_error_of_its_own() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(4).expand(3, 4))
    (found,) = told(zoo.audit(model))
    assert found.startswith(
        "error: contiguous: weight: is expanded (shape (3, 4), strides (0, 1)): its values share memory"
    )


@pytest.mark.parametrize(
    "view",
    [lambda w: w.t(), lambda w: w[:, ::2].as_strided((1, 4, 4), (0, 8, 2))],
    ids=["transposed", "one row of stride 0"],
)
def test_view_whose_values_have_places_of_their_own_is_not_called_expanded(view) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(view(torch.randn(4, 8)))
    (found,) = told(zoo.audit(model))
    assert found.startswith("error: contiguous: weight: is not contiguous")


@pytest.mark.parametrize("layer", [nn.Conv2d(3, 4, 3), nn.Conv3d(3, 4, 3)])
def test_channels_last_is_contiguous_and_other_orders_are_not(layer) -> None:
    form = torch.channels_last if isinstance(layer, nn.Conv2d) else torch.channels_last_3d
    assert told(zoo.audit(layer.to(memory_format=form))) == []
    layer.weight = nn.Parameter(layer.weight.detach().transpose(2, 3))
    (found,) = told(zoo.audit(layer))
    assert found.startswith("error: contiguous: weight: is not contiguous")


def test_sparse_parameter_has_no_strides_to_judge() -> None:
    model = nn.ParameterDict({"weight": nn.Parameter(torch.eye(3).to_sparse())})
    assert told(zoo.audit(model)) == []


@pytest.mark.parametrize("shape", [(1, 4), (4, 1), (0, 3), ()])
def test_shape_with_one_or_no_elements_is_contiguous(shape) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(shape[::-1]).t() if shape else torch.randn(()))
    assert told(zoo.audit(model)) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn])
def test_nan_of_any_dtype_is_named(dtype) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.tensor([1.0, torch.nan]).to(dtype), requires_grad=False)
    assert "error: finite: weight: holds NaN: 1 of 2 values are not finite; draw it again" in told(zoo.audit(model))[-1]


@pytest.mark.parametrize(("values", "count"), [([1.0, torch.inf], 1), ([torch.inf] * 2, 0), ([0.0, -torch.inf], 0)])
def test_inf_in_a_buffer_is_a_fault_unless_it_is_a_mask_or_a_bound(values, count) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("limits", torch.tensor(values))
    assert len(told(zoo.audit(model))) == count


def test_complex_buffer_is_no_mask() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("phases", torch.tensor([1.0, -torch.inf]).to(torch.complex64))
    assert told(zoo.audit(model))[0].startswith("error: finite: phases: holds Inf: 1 of 2 values")


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_nan_in_a_sparse_buffer_is_named(layout) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("edges", torch.tensor([[1.0, torch.nan], [0.0, 0.0]]).to_sparse(layout=layout))
    (found,) = told(zoo.audit(model))
    assert found.startswith("error: finite: edges: holds NaN: 1 of 4 values")


@pytest.mark.parametrize("values", [torch.empty(0, 3), torch.ones(2, dtype=torch.complex64).conj()])
def test_no_values_and_conjugate_ones_are_finite(values) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("table", values)
    assert told(zoo.audit(model)) == []


def test_table_of_bits_is_not_asked_for_nan() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("packed", torch.empty(2, dtype=torch.bits8))
    assert told(zoo.audit(model)) == []


@pytest.mark.parametrize("name", ["running_mean", "running_var"])
def test_running_statistics_are_never_a_bound(name) -> None:
    model = nn.BatchNorm1d(2)
    model.get_buffer(name).fill_(torch.inf)
    assert told(zoo.audit(model)) == [
        f"error: finite: {name}: holds Inf: 2 of 2 values are not finite; draw it again, or load a checkpoint from "
        "before"
    ]


def test_lazy_module_is_named_before_anything_is_measured() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LazyLinear(4), nn.LazyBatchNorm1d())
    report = zoo.audit(model, torch.optim.SGD(model.parameters(), lr=0.1), batch=torch.ones(2, 2))
    assert [finding.tensor for finding in report.findings] == [
        *("1.weight", "1.bias", "2.weight", "2.bias", "2.running_mean", "2.running_var")
    ]
    assert told(report)[0] == (
        "error: materialized: 1.weight: is a lazy module's and has no shape yet: run forward once, make the optimizer, "
        "audit again"
    )
    assert report.elements == 9
    model(torch.ones(2, 2))
    assert told(zoo.audit(model)) == []
