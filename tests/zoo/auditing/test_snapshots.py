from types import SimpleNamespace

import torch
from torch import distributed, nn

import zoo
from tests.zoo.auditing.steps import train
from zoo.auditing.snapshots import bare_model, hash_bytes


def test_learning_rate_is_the_highest_of_the_steps(vit) -> None:
    optimizer = torch.optim.SGD(vit.parameters(), lr=0.1)
    before = zoo.snapshot(vit, optimizer)
    train(vit, optimizer)
    optimizer.param_groups[0]["lr"] = 0.0
    train(vit, optimizer)
    assert {trace.learning_rate for trace in before.traces.values()} == {0.1}


def test_audit_ends_the_recording(vit) -> None:
    optimizer = torch.optim.SGD(vit.parameters(), lr=0.1)
    before = zoo.snapshot(vit, optimizer)
    train(vit, optimizer)
    zoo.audit(vit, optimizer, before=before)
    train(vit, optimizer)
    assert before.steps == 1
    assert {trace.gradients for trace in before.traces.values()} == {1}


def test_snapshot_sees_through_wrappers_of_the_model_and_of_the_optimizer(vit) -> None:
    optimizer = torch.optim.SGD(vit.parameters(), lr=0.1)
    before = zoo.snapshot(nn.DataParallel(vit), SimpleNamespace(optimizer=optimizer, param_groups=[]))
    assert before.parameters.keys() == dict(vit.named_parameters()).keys()
    train(vit, optimizer)
    assert before.steps == 1


def test_largest_gradient_is_of_all_passes_and_of_either_sign() -> None:
    model = nn.Linear(2, 1, bias=False)
    before = zoo.snapshot(model)
    for factor in (1.0, -3.0, 2.0):
        model.zero_grad()
        (model(torch.ones(1, 2)) * factor).sum().backward()
    assert (before.traces["weight"].gradients, before.traces["weight"].largest_gradient) == (3, 3.0)


def test_parameters_without_elements_and_gradients_without_values_are_followed() -> None:
    model = nn.Embedding(4, 3, sparse=True)
    model.none = nn.Parameter(torch.empty(0, 3))
    before = zoo.snapshot(model)
    (model(torch.empty(0, dtype=torch.long)).sum() + model.none.sum()).backward()
    assert {name: trace.gradients for name, trace in before.traces.items()} == {"none": 1, "weight": 1}
    assert {trace.largest_gradient for trace in before.traces.values()} == {0.0}


def test_gradient_that_another_hook_cleared_is_counted() -> None:
    model = nn.Linear(2, 2)
    for parameter in model.parameters():  # as an optimizer that steps in the backward pass does
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    before = zoo.snapshot(model)
    model(torch.ones(1, 2)).sum().backward()
    assert {trace.gradients for trace in before.traces.values()} == {1}


def test_bare_model_is_what_every_wrapper_wraps() -> None:
    model = nn.Linear(2, 2)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        for wrapped in (
            nn.parallel.DistributedDataParallel(model),
            nn.DataParallel(model),
            torch.compile(model, backend="eager"),
            nn.DataParallel(torch.compile(model, backend="eager")),
        ):
            assert bare_model(wrapped) is model
    finally:
        distributed.destroy_process_group()


def test_hash_tells_bits_not_values() -> None:
    assert hash_bytes(torch.tensor([torch.nan])) == hash_bytes(torch.tensor([torch.nan]))
    assert hash_bytes(torch.tensor(0.0)) != hash_bytes(torch.tensor(-0.0))


def test_hash_is_of_the_values_in_their_order_however_they_are_stored() -> None:
    values = torch.randn(3, 2, dtype=torch.complex64)
    assert hash_bytes(values.t()) == hash_bytes(values.t().contiguous())
    assert hash_bytes(values.t()) != hash_bytes(values)
    assert hash_bytes(values.conj()) == hash_bytes(values.conj().resolve_conj())
    imaginary = values.conj().imag  # lazily negated
    assert hash_bytes(imaginary) == hash_bytes(imaginary.resolve_neg())


def test_gradient_in_pieces_is_summed_before_it_is_measured() -> None:
    model = nn.Embedding(4, 3, sparse=True)
    before = zoo.snapshot(model)
    model(torch.tensor([1, 1])).sum().backward()
    assert before.traces["weight"].largest_gradient == 2.0


@torch.inference_mode()
def test_model_made_for_inference_has_a_snapshot() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    before = zoo.snapshot(model)
    model.weight.zero_()
    assert [name for name, trace in before.frozen.items() if trace.written] == ["weight"]
