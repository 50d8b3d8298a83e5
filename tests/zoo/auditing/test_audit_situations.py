"""The audit where people tell of it: raw parameters that look right and do not learn, or look wrong and do."""

import copy

import pytest
import torch
from torch import Tensor, nn

import zoo


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        (model(torch.ones(2, 4)) - 1).square().sum().backward()
        optimizer.step()


def audit_training(model: nn.Module) -> list[str]:
    """Return what the audit says before and after some steps, probe included, but for notes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = zoo.snapshot(model, optimizer)
    train(model, optimizer)
    report = zoo.audit(model, optimizer, batch=torch.ones(2, 4), before=before)
    return [str(finding) for finding in report.findings if finding.severity != "note"]


class Scaled(nn.Module):
    """A Linear whose activation has a scale: learned, if it is a parameter."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.scale = nn.Linear(4, 4), scale

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(self.linear(x)) * self.scale


def test_learned_activation_scale_with_nn_parameter_has_no_finding() -> None:
    assert audit_training(Scaled(nn.Parameter(torch.ones(1)))) == []


@pytest.mark.parametrize("requires_grad", [True, False])
def test_learned_activation_scale_without_nn_parameter_is_named(requires_grad) -> None:
    (found,) = audit_training(Scaled(torch.ones(1, requires_grad=requires_grad)))
    assert found.startswith("error: registered: scale: is a plain tensor of shape (1,)")
    assert "make it an nn.Parameter" in found


def test_kernel_generated_afresh_from_parameters_in_each_forward_has_no_finding() -> None:
    class Hyper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.code, self.generator = nn.Parameter(torch.randn(3)), nn.Linear(3, 16)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.generator(self.code).view(4, 4)

    assert audit_training(Hyper()) == []


def test_parameter_built_in_forward_is_named_by_its_module() -> None:
    class Builds(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * nn.Parameter(torch.ones(4))

    (found,) = audit_training(nn.Sequential(nn.Linear(4, 4), Builds(4, 4)))
    assert found.startswith("error: probe: 1: its forward builds a tensor of shape (4,) that requires a gradient")


class Twice(nn.Module):
    """Applies one layer after the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_one_weight_in_two_layers_trains_as_one() -> None:
    model = Twice()
    model.second.weight = model.first.weight
    assert audit_training(model) == []
    assert torch.equal(model.first.weight, model.second.weight)


def test_two_copies_of_what_was_meant_to_be_one_are_noted_before_they_part() -> None:
    def share(model: Twice) -> Twice:
        model.second.load_state_dict(model.first.state_dict())
        return model

    model = share(Twice())
    assert [str(finding) for finding in zoo.audit(model).findings] == [
        "note: tie: second: is an equal copy of first, not tied to it, in 2 tensors: they will part"
    ]
    assert audit_training(model) == []  # nothing is wrong with training two
    assert not torch.equal(model.first.weight, model.second.weight)


def test_first_parameters_frozen_with_the_optimizer_over_the_rest_stay_still() -> None:
    model = Twice()
    zoo.freeze(model, "first")
    optimizer = torch.optim.AdamW(model.second.parameters(), lr=0.1)
    before, still = zoo.snapshot(model, optimizer), copy.deepcopy(model.first.state_dict())
    train(model, optimizer)
    assert zoo.audit(model, optimizer, before=before).findings == ()
    assert all(torch.equal(tensor, still[name]) for name, tensor in model.first.state_dict().items())


def test_model_changed_after_the_optimizer_was_made_is_told_from_both_sides_and_by_the_steps() -> None:
    model = Twice()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.second = nn.Linear(4, 2)
    before = zoo.snapshot(model, optimizer)
    train(model, optimizer)
    said = str(zoo.audit(model, optimizer, before=before))
    assert "error: optimizer: second.weight: is trainable and in no optimizer group" in said
    assert "error: optimizer: group 0, tensor 2: of shape (4, 4) is held by the optimizer and is not (any more)" in said
    assert "error: progress: second.weight: did not change: no optimizer group held it" in said


def test_initialisation_again_inside_the_loop_is_told_from_training() -> None:
    model = Twice()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = zoo.snapshot(model, optimizer)
    for _ in range(3):
        train(model, optimizer, steps=1)
        nn.init.xavier_normal_(model.second.weight)
    (finding,) = zoo.audit(model, optimizer, before=before).findings
    assert (finding.check, finding.severity, finding.tensor) == ("rewritten", "error", "second.weight")


def test_parameter_replaced_through_data_between_the_steps_is_named() -> None:
    model = Twice()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = zoo.snapshot(model, optimizer)
    train(model, optimizer, steps=1)
    model.first.weight.data = torch.randn(4, 4)
    train(model, optimizer, steps=1)
    (finding,) = zoo.audit(model, optimizer, before=before).findings
    assert (finding.check, finding.tensor) == ("rewritten", "first.weight")
