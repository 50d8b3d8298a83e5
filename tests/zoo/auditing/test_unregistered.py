from collections import deque
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from torch import nn

import zoo
from zoo.auditing.unregistered import iter_unregistered


@dataclass
class Held:
    inner: Any


class Holder:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def call(self) -> Any:
        return self.inner


class Slotted:
    __slots__ = ("inner", "unset")

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is not to be asked for")


class SlottedBelow(Slotted):
    __slots__ = "more"


class OneSlot:
    __slots__ = "inner"

    def __init__(self, inner: Any) -> None:
        self.inner = inner


def closing_over(inner: Any) -> Any:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x @ inner

    return forward


def by_default(inner: Any) -> Any:
    def forward(x: torch.Tensor, *, w: Any = inner) -> torch.Tensor:
        return x @ w

    return forward


def by_position(inner: Any) -> Any:
    def forward(x: torch.Tensor, w: Any = inner) -> torch.Tensor:
        return x @ w

    return forward


PLACES = {
    "held[0]": lambda it: [it],
    "held['a']": lambda it: {"a": it},
    "held['a'][1][0]": lambda it: {"a": (1, (it,))},
    "held[0][0]": lambda it: deque([{it}]),
    "held[0][0][0]": lambda it: [[frozenset([it])]],
    "held.inner": Held,
    "held.inner.inner": lambda it: Held(Holder(it)),
    "held.a": lambda it: SimpleNamespace(a=it),
    "held.args[0]": lambda it: partial(torch.matmul, it),
    "held.keywords['other']": lambda it: partial(torch.matmul, other=it),
    "held.__closure__['inner']": closing_over,
    "held.__closure__['inner'].inner": lambda it: closing_over(Holder(it)),
    "held.__kwdefaults__['w']": by_default,
    "held.__defaults__[0]": by_position,
    "held.func.__closure__['inner']": lambda it: partial(closing_over(it)),
    "held.__self__.inner": lambda it: Holder(it).call,
}


def errors(model: nn.Module) -> list[str]:
    return [str(finding) for finding in zoo.audit(model).findings if finding.check == "registered"]


def holding(value: Any) -> nn.Module:
    model = nn.Linear(2, 2)
    model.held = value
    return model


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", [nn.Parameter, torch.Tensor])
def test_tensor_that_requires_a_gradient_is_found_wherever_it_is_kept(place, kind) -> None:
    tensor = nn.Parameter(torch.ones(2, 2)) if kind is nn.Parameter else torch.ones(2, 2, requires_grad=True)
    (found,) = errors(holding(PLACES[place](tensor)))
    what = "an nn.Parameter in a plain container" if kind is nn.Parameter else "a plain tensor"
    assert found.startswith(f"error: registered: {place}: is {what} of shape (2, 2)")
    assert "neither parameter nor buffer of the model" in found
    assert "make it an nn.Parameter (many: nn.ParameterList)" in found


@pytest.mark.parametrize("place", PLACES)
def test_registered_parameter_is_no_fault_wherever_it_is_kept_too(place) -> None:
    model = nn.Linear(2, 2)
    model.held = PLACES[place](model.weight)
    assert errors(model) == []


@pytest.mark.parametrize("make", [Held, lambda it: SimpleNamespace(inner=it)])
def test_dataclasses_and_namespaces_stand_for_their_items(make) -> None:
    (found,) = errors(holding(make(torch.ones(3))))
    assert found.startswith("error: registered: held.inner: is a plain tensor of shape (3,)")


def test_variable_that_its_function_has_not_set_yet_is_passed_over() -> None:
    def later() -> Any:
        return weight

    assert errors(holding(later)) == []
    weight = nn.Parameter(torch.ones(1))
    assert len(errors(holding(later))) == 1


@pytest.mark.parametrize("make", [Holder, Slotted, SlottedBelow, OneSlot])
def test_object_is_searched_for_what_trains_and_keeps_its_own_tables(make) -> None:
    assert errors(holding(make(torch.ones(3)))) == []
    (found,) = errors(holding(make(nn.Linear(2, 2))))
    assert found.startswith("error: registered: held.inner: is a Linear in a plain container, with 2 tensors")


def test_objects_of_objects_lead_out_of_the_model() -> None:
    assert errors(holding(Holder(Holder(nn.Linear(2, 2))))) == []


class Owner:
    weight = nn.Parameter(torch.ones(1))


class Pictures(torch.utils.data.Dataset[Any]):
    transform = None

    def __init__(self) -> None:
        self.transform = nn.Linear(2, 2)


def code_with_a_parameter() -> ModuleType:
    code = ModuleType("code")
    code.weight = Owner.weight
    return code


@pytest.mark.parametrize(
    "make",
    [lambda: torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), Pictures, code_with_a_parameter, lambda: Owner],
    ids=["optimizer", "dataset", "code", "class"],
)
def test_what_belongs_to_no_model_is_not_searched(make) -> None:
    assert errors(holding(make())) == []


def test_tensor_of_a_class_is_found_once_for_all_its_modules() -> None:
    class Scaled(nn.Module):
        scale = torch.ones(4)
        gains = (nn.Parameter(torch.ones(2)),)
        layer = nn.Linear(2, 2)
        table = {"a": torch.ones(1)}  # noqa: RUF012  (the fault)

    class Below(Scaled):
        shift = torch.ones(4)

    assert [line.split(": ")[2] for line in errors(nn.Sequential(Scaled(), Scaled(), Below()))] == [
        "0.scale",
        "0.gains[0]",
        "0.layer",
        "0.table['a']",
        "2.shift",
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Parameter(torch.ones(2, 2)) * 0.02,
        lambda: nn.Parameter(torch.ones(2, 2)).to(torch.float64),
        lambda: torch.ones(2, 2, requires_grad=True).view(4),
    ],
)
def test_parameter_scaled_or_cast_after_it_was_made_is_no_parameter(make) -> None:
    (found,) = errors(holding(make()))
    assert found.startswith("error: registered: held: was computed once from tensors that the model does not hold")
    assert "(shape (2, 2))" in found
    assert "nn.Parameter(0.02 * torch.randn(...))" in found


def test_activation_that_a_module_keeps_is_computed_from_its_parameters() -> None:
    model = nn.Linear(2, 2)
    model.held = model(torch.ones(1, 2))
    assert errors(model) == []


def test_activation_of_an_input_that_requires_a_gradient_is_computed_from_the_model_too() -> None:
    model = nn.Linear(2, 2)
    model.held = model(torch.ones(1, 2, requires_grad=True))
    assert errors(model) == []


def test_what_is_registered_is_not_yielded_wherever_it_is_kept_too() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    model.held = [model[0], model[0].weight, model[0].running_mean]
    assert list(iter_unregistered(model)) == []


def test_hidden_module_over_tensors_of_the_model_is_no_fault() -> None:
    model, hidden = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    hidden.weight, hidden.bias = model.weight, model.bias
    hidden.running_mean, hidden.running_var = model.running_mean, model.running_var
    hidden.num_batches_tracked = model.num_batches_tracked
    model.held = [hidden]
    assert errors(model) == []


def test_hidden_module_with_buffers_alone_is_a_warning() -> None:
    (found,) = errors(holding([nn.BatchNorm1d(2, affine=False)]))
    assert found.startswith("warning: registered: held[0]: is a BatchNorm1d in a plain container, with 3 tensors")


def test_hidden_module_that_is_frozen_in_part_is_an_error() -> None:
    hidden = nn.Linear(2, 2)
    hidden.bias.requires_grad_(False)
    (found,) = errors(holding([hidden]))
    assert found.startswith("error: registered: held[0]: is a Linear")


def test_complex_tensor_is_named_as_a_float_one() -> None:
    (found,) = errors(holding(torch.ones(2, dtype=torch.complex64)))
    assert found.startswith("error: registered: held: is a plain tensor of shape (2,)")


def test_hidden_module_that_is_frozen_is_a_warning() -> None:
    (found,) = errors(holding([nn.Linear(2, 2).requires_grad_(False)]))
    assert found.startswith("warning: registered: held[0]: is a Linear")


@pytest.mark.parametrize("value", [torch.arange(3), None, "weights", 3, [1, 2], {"a": None}, torch.float32])
def test_what_is_no_float_tensor_is_no_fault(value) -> None:
    assert errors(holding(value)) == []


def test_everything_found_is_yielded_once() -> None:
    tensor = torch.ones(1)
    assert [held.name for held in iter_unregistered(holding([tensor, tensor, {"again": tensor}]))] == ["held[0]"]


def test_cache_that_a_module_fills_in_eval_mode_is_no_lost_parameter() -> None:
    model = timm.create_model(
        "levit_128s", img_size=64, embed_dim=(32, 32, 32), depth=(1, 1, 1), num_heads=(2, 2, 2), num_classes=3
    ).eval()
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        model(images)
    assert any("attention_bias_cache['cpu']" in held.name for held in iter_unregistered(model))
    assert zoo.audit(model, batch=images).findings == ()


@pytest.mark.parametrize(
    ("attribute", "value", "errors"),
    [
        ("rope_cache", torch.ones(2), 0),
        ("_bias_cache", {"cpu": [torch.ones(2)]}, 0),
        ("rope_cached", torch.ones(2), 1),
        ("rope_cache", torch.ones(2, requires_grad=True), 1),
        ("rope_cache", [nn.Parameter(torch.ones(2))], 1),
        ("rope_cache", torch.ones(2, requires_grad=True) * 2, 1),
    ],
)
def test_only_what_cannot_learn_is_left_out_under_a_caches_name(attribute, value, errors) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    setattr(model[0], attribute, value)
    found = zoo.audit(model).errors
    assert len(found) == errors
    assert all(finding.tensor.startswith(f"0.{attribute}") for finding in found)
