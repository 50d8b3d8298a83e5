"""Parameters that are other objects than at the snapshot, and ties that were broken since."""

import torch
from torch import nn

import zoo
from tests.zoo.auditing.steps import lines, train


def test_parameter_replaced_in_the_loop_is_named_on_both_checks(vit) -> None:
    optimizer = torch.optim.SGD(vit.parameters(), lr=0.1)
    before = zoo.snapshot(vit, optimizer)
    train(vit, optimizer)
    vit.blocks[0].attn.qkv.weight = nn.Parameter(torch.randn(96, 32))
    report = zoo.audit(vit, optimizer, before=before)
    assert "error: replaced: blocks.0.attn.qkv.weight: was created anew since the snapshot (shape (96, 32)" in str(
        report
    )
    assert "error: optimizer: blocks.0.attn.qkv.weight: of shape (96, 32) is held by the optimizer" in str(report)


def test_parameter_that_came_or_went_is_named(vit) -> None:
    before = zoo.snapshot(vit)
    vit.head.bias = None
    vit.gain = nn.Parameter(torch.ones(1))
    report = zoo.audit(vit, before=before)
    assert "error: replaced: head.bias: was a parameter at the snapshot and is none now" in str(report)
    assert "error: replaced: gain: appeared since the snapshot" in str(report)


def test_broken_tie_is_named() -> None:
    model = nn.ModuleDict({"embed": nn.Linear(4, 3, bias=False), "head": nn.Linear(4, 3, bias=False)})
    model["head"].weight = model["embed"].weight
    before = zoo.snapshot(model)
    model["head"].weight = nn.Parameter(model["embed"].weight.detach().clone())
    found = lines(zoo.audit(model, before=before))
    assert "error: tie: head.weight: was one tensor with embed.weight and is another now: tie them again" in found


def test_tie_that_is_kept_has_no_finding_but_its_note() -> None:
    model = nn.ModuleDict({"embed": nn.Linear(4, 3, bias=False), "head": nn.Linear(4, 3, bias=False)})
    model["head"].weight = model["embed"].weight
    before = zoo.snapshot(model)
    nn.init.normal_(model["head"].weight)
    assert lines(zoo.audit(model, before=before)) == [
        "note: tie: head.weight: is one tensor with embed.weight, counted once"
    ]


def test_parameter_of_another_shape_is_told_with_both_shapes(vit) -> None:
    before = zoo.snapshot(vit)
    vit.reset_classifier(5)
    found = lines(zoo.audit(vit, before=before))
    assert "error: replaced: head.weight: was created anew since the snapshot (shape (3, 32), now (5, 32))" in found[0]
    assert len(found) == 2  # nothing of an init pass, which this was none


def test_tie_whose_first_name_was_replaced_is_broken_for_all_the_others() -> None:
    model = nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in "abcd"})
    model["b"].weight = model["c"].weight = model["d"].weight = model["a"].weight
    before = zoo.snapshot(model)
    model["a"].weight = nn.Parameter(torch.ones(3, 3))
    model["d"].weight = None
    errors = zoo.audit(model, before=before).errors
    assert [(error.check, error.tensor) for error in errors] == [
        ("replaced", "a.weight"),
        ("replaced", "d.weight"),
        ("tie", "b.weight"),
        ("tie", "c.weight"),
    ]


def test_parameter_replaced_before_the_steps_is_told_as_replaced_alone(vit) -> None:
    before = zoo.snapshot(vit)
    vit.cls_token = nn.Parameter(vit.cls_token.detach().clone())
    train(vit, torch.optim.AdamW(vit.parameters(), lr=0.01))
    assert [finding.check for finding in zoo.audit(vit, before=before).errors] == ["replaced"]
