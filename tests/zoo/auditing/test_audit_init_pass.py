"""What a snapshot tells of an init pass: whether it reached anything, and what it left untouched."""

import torch
from torch import nn

import zoo
from tests.zoo.auditing.steps import told


def test_init_function_that_looks_for_parameters_never_runs(model) -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Parameter):
            nn.init.kaiming_uniform_(module)

    before = zoo.snapshot(model)
    model.apply(init)
    (found,) = told(zoo.audit(model, before=before), "init")
    assert found.startswith("error: init: nothing reached a parameter")
    assert "Module.apply hands its function modules, so that isinstance(m, nn.Parameter) never holds" in found


def test_init_function_for_linear_layers_leaves_raw_parameters_which_are_named(model) -> None:
    def init(module: nn.Module) -> None:
        if type(module) is nn.Linear or isinstance(module, nn.Conv2d | nn.LayerNorm):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
        elif hasattr(module, "cls_token"):
            nn.init.normal_(module.cls_token)
            nn.init.normal_(module.pos_embed)

    before = zoo.snapshot(model)
    model.apply(init)
    report = zoo.audit(model, before=before)
    found = told(report, "init")
    raw = [name for name, _ in model.named_parameters() if ".attn." in name]
    assert [line.split(": ")[:3] for line in found] == [["warning", "init", name] for name in raw]
    assert (
        f"untouched by the init pass, as {len(raw)} of {len(list(model.parameters()))} were; the pass look" in found[0]
    )
    assert len(str(report).splitlines()) == 2
    assert told(report, "progress") == []


def test_few_parameters_left_by_an_init_pass_are_findings_of_their_own(model) -> None:
    before = zoo.snapshot(model)
    for name, parameter in model.named_parameters():
        if name != "blocks.1.attn.proj.projection":
            nn.init.normal_(parameter)
    report = zoo.audit(model, before=before)
    assert [finding.tensor for finding in report.findings if finding.check == "init"] == [
        "blocks.1.attn.proj.projection"
    ]
    assert "was left untouched by the init pass" in str(report)


def test_writing_the_same_values_counts_as_touching(model) -> None:
    before = zoo.snapshot(model)
    for parameter in model.parameters():
        nn.init.ones_(parameter) if parameter.ndim == 1 and bool((parameter == 1).all()) else nn.init.normal_(parameter)
    assert told(zoo.audit(model, before=before), "init") == []


def test_init_through_data_is_seen_by_the_bytes(model) -> None:
    zoo.freeze(model, "head")
    before = zoo.snapshot(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for parameter in model.parameters():
        parameter.data.normal_()
    assert told(zoo.audit(model, before=before), "init", "progress") == []


def test_frozen_parameters_belong_to_an_init_pass_too(model) -> None:
    zoo.freeze(model, "head.weight")
    before = zoo.snapshot(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    assert [finding.tensor for finding in zoo.audit(model, before=before).findings if finding.check == "init"] == [
        "head.weight"
    ]


def test_parameter_without_elements_cannot_be_touched(model) -> None:
    model.none = nn.Parameter(torch.empty(0, 3))
    before = zoo.snapshot(model)
    for parameter in model.parameters():
        if parameter.numel():
            nn.init.normal_(parameter)
    assert told(zoo.audit(model, before=before), "init") == []
