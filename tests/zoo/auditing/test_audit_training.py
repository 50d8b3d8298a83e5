"""What the audit says after some steps of training, by a snapshot from before them."""

import copy

import pytest
import timm
import torch
from torch import nn

import zoo
from tests.zoo.auditing.steps import lines, train


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("attention", ["linear", "separate", "parameter"])
def test_healthy_training_has_no_findings(kind, attention) -> None:
    model = zoo.create_model(
        "vit_tiny_patch16_224",
        attention,
        seed=0,
        init="torch",
        img_size=32,
        patch_size=8,
        embed_dim=32,
        depth=2,
        num_heads=2,
        num_classes=3,
    )
    optimizer = kind(model.parameters(), lr=1e-2)
    before = zoo.snapshot(model, optimizer)
    train(model, optimizer, steps=2)
    assert before.steps == 2
    report = zoo.audit(model, optimizer, before=before)
    # without rope a key bias has no effect, and SGD moves it by rounding noise alone
    assert {finding.tensor.rpartition(".")[2] for finding in report.findings} <= {"bias", "to_k_bias"}
    assert all("a key bias shifts all logits" in line and line.startswith("note") for line in lines(report))


def test_optimizer_made_before_the_head_was_replaced_steps_orphans(vit) -> None:  # reported: bubbliiiing/detr-pytorch#6
    optimizer = torch.optim.SGD(vit.parameters(), lr=0.1)
    vit.reset_classifier(3)
    before = zoo.snapshot(vit, optimizer)
    train(vit, optimizer, steps=3)
    found = lines(zoo.audit(vit, optimizer, before=before))
    assert "error: progress: head.weight: did not change: no optimizer group held it" in found
    assert any("of shape (3, 32) is held by the optimizer and is not" in line for line in found)


def test_optimizer_of_another_model_changes_nothing_and_is_said_once(
    vit,
) -> None:  # reported: bubbliiiing/detr-pytorch#6
    optimizer = torch.optim.SGD(copy.deepcopy(vit).parameters(), lr=0.1)
    before = zoo.snapshot(vit, optimizer)
    train(vit, optimizer, steps=3)
    found = [line for line in lines(zoo.audit(vit, optimizer, before=before)) if "progress" in line]
    assert found == [
        "error: progress: 3 steps changed none of the 32 trainable parameters: the optimizer steps orphans; make it "
        "from the model as it is now"
    ]


def test_parameter_without_a_gradient_is_named_though_gradients_were_cleared(vit) -> None:
    vit.extra_head = nn.Linear(32, 5)
    optimizer = torch.optim.AdamW(vit.parameters(), lr=1e-2)
    before = zoo.snapshot(vit, optimizer)
    train(vit, optimizer)
    assert [line.split(" in 1 steps")[0] for line in lines(zoo.audit(vit, optimizer, before=before))] == [
        "error: progress: extra_head.weight: got no gradient",
        "error: progress: extra_head.bias: got no gradient",
    ]


def test_optimizer_that_misses_a_parameter_leaves_it_unchanged(vit) -> None:
    optimizer = torch.optim.SGD([p for n, p in vit.named_parameters() if n != "cls_token"], lr=0.1)
    before = zoo.snapshot(vit, optimizer)
    train(vit, optimizer)
    assert "progress: cls_token: did not change: no optimizer group held it" in str(
        zoo.audit(vit, optimizer, before=before)
    )


@pytest.mark.parametrize(("steps", "severity"), [(1, "note"), (2, "warning"), (3, "error")])
def test_zero_gradient_is_no_fault_once_and_an_error_in_the_end(vit, steps, severity) -> None:
    vit.patch_embed.proj.weight.data.fill_(0.1)
    optimizer = torch.optim.AdamW(vit.parameters(), lr=1e-2)
    before = zoo.snapshot(vit, optimizer)
    train(vit, optimizer, steps, draw=torch.zeros)  # black images: no gradient reaches the patch weights
    (found,) = lines(zoo.audit(vit, optimizer, before=before))
    assert found.startswith(
        f"{severity}: progress: patch_embed.proj.weight: its gradient was exactly zero in all {steps}"
    )


def test_zero_initialised_head_is_no_fault_at_the_first_step() -> None:
    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=32,
        patch_size=8,
        embed_dim=32,
        depth=2,
        num_heads=2,
        num_classes=3,
        weight_init="jax",
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = zoo.snapshot(model, optimizer)
    train(model, optimizer)
    report = zoo.audit(model, optimizer, before=before)
    assert {finding.severity for finding in report.findings} == {"note"}
    before = zoo.snapshot(model, optimizer)
    train(model, optimizer)
    assert lines(zoo.audit(model, optimizer, before=before)) == []


def test_step_below_the_resolution_is_a_warning() -> None:
    model = nn.Linear(2, 2)
    model.weight.data.fill_(1.0)
    optimizer = torch.optim.SGD([{"params": [model.weight], "lr": 1e-9}, {"params": [model.bias]}], lr=0.1)
    before = zoo.snapshot(model, optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    (found,) = lines(zoo.audit(model, optimizer, before=before))
    assert found.startswith("warning: progress: weight: did not change in 1 steps")
    assert "below torch.float32's resolution" in found


def test_first_step_of_a_warm_up_from_zero_is_a_warning(vit) -> None:
    optimizer = torch.optim.SGD(vit.parameters(), lr=0.0)
    before = zoo.snapshot(vit, optimizer)
    train(vit, optimizer)
    (found,) = lines(zoo.audit(vit, optimizer, before=before))
    assert found.startswith(
        "warning: progress: 1 steps changed none of the 32 trainable parameters: the learning rate was 0"
    )


def test_snapshot_without_an_optimizer_counts_backward_passes(vit) -> None:
    before = zoo.snapshot(vit)
    train(vit, torch.optim.SGD([vit.head.weight], lr=0.1), steps=2)
    report = zoo.audit(vit, before=before)
    assert len(report.errors) == len(report.findings) == 31
    assert "error: progress: cls_token: did not change in 2 steps, with gradients up to" in str(report)


def test_step_that_goes_by_the_optimizer_is_told_of_once(vit) -> None:
    optimizer = torch.optim.SGD(vit.parameters(), lr=0.1)
    before = zoo.snapshot(vit, optimizer)
    vit(torch.ones(1, 3, 32, 32)).sum().backward()
    with torch.no_grad():
        for parameter in vit.parameters():
            parameter.sub_(0.1 * parameter.grad)
    (found,) = lines(zoo.audit(vit, optimizer, before=before))
    assert found.startswith("error: progress: 1 backward passes and no optimizer step since the snapshot")


def test_optimizer_without_a_learning_rate_is_taken_as_it_is() -> None:
    class Halves(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self) -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(0.5)

    model = nn.Linear(2, 2)
    optimizer = Halves(model.parameters(), {})
    before = zoo.snapshot(model, optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert zoo.audit(model, optimizer, before=before).findings == ()


def test_optimizer_that_undoes_its_step_is_caught(vit) -> None:
    optimizer = torch.optim.SGD(vit.parameters(), lr=0.1)
    before = zoo.snapshot(vit, optimizer)
    kept = vit.cls_token.detach().clone()
    train(vit, optimizer)
    vit.cls_token.data.copy_(kept)
    assert "error: progress: cls_token: did not change in 1 steps, with gradients up to" in str(
        zoo.audit(vit, optimizer, before=before)
    )


def test_parameter_written_to_without_a_gradient_is_a_warning(vit) -> None:
    vit.extra = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD(vit.parameters(), lr=0.1)
    before = zoo.snapshot(vit, optimizer)
    train(vit, optimizer)
    vit.extra.data.normal_()
    (found,) = lines(zoo.audit(vit, optimizer, before=before))
    assert found == "warning: progress: extra: changed though no gradient arrived: something else writes to it"


def test_audit_without_a_step_since_the_snapshot_says_so(vit) -> None:
    optimizer = torch.optim.SGD(vit.parameters(), lr=0.1)
    (found,) = lines(zoo.audit(vit, optimizer, before=zoo.snapshot(vit, optimizer)))
    assert "no optimizer step was taken since the snapshot" in found


def test_frozen_parameters_are_not_expected_to_move(vit) -> None:
    zoo.freeze(vit, ["patch_embed", "blocks.0"])
    optimizer = torch.optim.AdamW([p for p in vit.parameters() if p.requires_grad], lr=1e-2)
    before = zoo.snapshot(vit, optimizer)
    train(vit, optimizer)
    assert lines(zoo.audit(vit, optimizer, before=before)) == []


def test_parameter_frozen_since_the_snapshot_is_not_expected_to_move(vit) -> None:
    optimizer = torch.optim.AdamW(vit.parameters(), lr=0.01)
    before = zoo.snapshot(vit, optimizer)
    zoo.freeze(vit, "head")
    train(vit, optimizer)
    assert {finding.check for finding in zoo.audit(vit, optimizer, before=before).findings} == {"optimizer"}


def test_steps_of_a_model_with_nothing_trainable_are_told_of_by_requires_grad_alone(vit) -> None:
    zoo.freeze(vit, "all")
    optimizer = torch.optim.SGD(vit.parameters(), lr=0.1)
    before = zoo.snapshot(vit, optimizer)
    optimizer.step()
    (error,) = zoo.audit(vit, optimizer, before=before).errors
    assert error.check == "requires_grad"


def test_steps_are_counted_where_gradients_are_accumulated(vit) -> None:
    vit.extra = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW(vit.parameters(), lr=0.01)
    before = zoo.snapshot(vit, optimizer)
    for _ in range(3):
        vit(torch.randn(1, 3, 32, 32)).square().sum().backward()
    optimizer.step()
    (found,) = lines(zoo.audit(vit, optimizer, before=before))
    assert found.startswith("error: progress: extra: got no gradient in 1 steps")


def test_key_bias_of_attention_that_forward_does_not_use_is_an_error(vit) -> None:
    vit.spare = zoo.Attention(32, 2, 16, variant="separate", qkv_bias=True)
    optimizer = torch.optim.AdamW(vit.parameters(), lr=0.01)
    before = zoo.snapshot(vit, optimizer)
    train(vit, optimizer)
    errors = zoo.audit(vit, optimizer, before=before).errors
    assert {error.tensor for error in errors} == {name for name, _ in vit.named_parameters() if "spare" in name}
