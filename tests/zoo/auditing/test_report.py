import json
import random
from types import SimpleNamespace

import pytest
import timm
import torch
from torch import nn

import zoo
from zoo.errors import AuditError, ZooError

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 3}


@pytest.fixture
def vit() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", **TINY)


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def lines(report, severity: str = "error") -> list[str]:
    return [str(finding) for finding in report.findings if finding.severity == severity]


def only_error(report) -> str:
    (line,) = lines(report)
    with pytest.raises(AuditError) as caught:
        report.raise_for_findings()
    assert line in str(caught.value)
    return line


@pytest.mark.parametrize("attention", ["linear", "separate", "parameter"])
@pytest.mark.parametrize("init", [None, "torch"])
def test_swapped_model_raises_no_alarm(attention, init, images) -> None:
    model = zoo.create_model("vit_tiny_patch16_224", attention, init=init, seed=0, **TINY)
    report = zoo.audit(model, torch.optim.AdamW(model.parameters()), batch=images)
    assert lines(report, "error") == lines(report, "warning") == []
    assert [row.name for row in report.attentions] == ["blocks.0.attn", "blocks.1.attn"]


def test_report_counts_reads_in_one_line_and_is_json(vit) -> None:
    zoo.freeze(vit, "patch_embed")
    report = zoo.audit(vit, torch.optim.SGD(vit.parameters(), lr=0.1))
    assert report.verdict() == "audit: 32 parameters, 30 trainable, 2 notes"
    assert report.elements == sum(parameter.numel() for parameter in vit.parameters())
    told = json.loads(json.dumps(report.to_dict()))
    assert told["trainable"] == 30
    assert told["verdict"] == report.verdict()
    assert told["findings"][0]["tensor"] == "patch_embed.proj.weight"
    assert told["attentions"][1]["name"] == "blocks.1.attn"
    report.raise_for_findings()


def test_report_has_errors_first_then_warnings_then_notes_and_raises_for_errors_alone() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    model["b"].weight = model["a"].weight
    model.others = [nn.Linear(2, 2).requires_grad_(False)]
    report = zoo.audit(model)
    assert report.verdict() == "audit: 1 parameters, 1 trainable, 1 warning, 1 note"
    report.raise_for_findings()
    model["a"].lost = torch.ones(1)
    report = zoo.audit(model)
    assert [finding.severity for finding in report.findings] == ["error", "warning", "note"]
    assert [finding.severity for finding in report.errors] == ["error"]
    assert str(report).splitlines() == [report.verdict(), *(f"  {finding}" for finding in report.findings)]
    with pytest.raises(AuditError) as caught:
        report.raise_for_findings()
    assert str(caught.value).splitlines() == [report.verdict(), f"  {report.errors[0]}"]


def test_layers_and_tensors_in_plain_containers_are_named(vit) -> None:  # reported: pytorch/pytorch#632
    vit.blocks[0].layers = [nn.Linear(2, 2), nn.ReLU()]
    vit.blocks[1].t = torch.randn(3, requires_grad=True)
    vit.deep = {"a": ({"b": torch.ones(2)},)}
    vit.mine = [nn.Parameter(torch.ones(1))]
    report = zoo.audit(vit)
    assert [line.split(" of shape")[0].split(", with")[0] for line in lines(report)] == [
        "error: registered: deep['a'][0]['b']: is a plain tensor",
        "error: registered: mine[0]: is an nn.Parameter in a plain container",
        "error: registered: blocks.0.layers[0]: is a Linear in a plain container",
        "error: registered: blocks.1.t: is a plain tensor",
    ]
    with pytest.raises(
        AuditError, match=r"audit: 32 parameters.*4 errors(?s:.*)blocks\.1\.t: .*make it an nn\.Parameter"
    ):
        report.raise_for_findings()


def test_registered_integral_and_computed_tensors_in_attributes_are_no_fault(vit) -> None:
    vit.alias = [vit.head.weight, vit.blocks[0]]
    vit.index = torch.arange(3)
    vit.doubled = vit.head.weight * 2
    vit.itself = [vit.alias]
    vit.alias.append(vit.itself)
    assert lines(zoo.audit(vit)) == []


def test_parameter_that_nobody_froze_by_name_is_an_error_and_a_freeze_is_none(vit) -> None:
    vit.head.weight.requires_grad_(False)
    assert "head.weight: requires_grad is off and no freeze pattern named it" in only_error(zoo.audit(vit))
    zoo.freeze(vit, "head.weight")
    assert lines(zoo.audit(vit)) == []


def test_everything_frozen_is_no_trainable_parameters(vit, images) -> None:
    zoo.freeze(vit, "*")
    report = zoo.audit(vit, torch.optim.SGD(vit.parameters(), lr=0.1), batch=images)
    assert "no trainable parameters: all 32 are frozen" in only_error(report)
    assert report.verdict().startswith("audit: 32 parameters, 0 trainable, 1 error")


def test_trainable_parameters_missing_from_the_optimizer_are_named(vit) -> None:  # reported: facebookresearch/mmf#104
    report = zoo.audit(vit, torch.optim.SGD(vit.head.parameters(), lr=0.1))
    assert len(report.errors) == 30
    assert "error: optimizer: cls_token: is trainable and in no optimizer group" in str(report)
    assert "head.weight" not in str(report)


def test_frozen_parameter_in_the_optimizer_is_a_note(vit) -> None:  # reported: facebookresearch/mmf#104
    zoo.freeze(vit, "head.bias")
    report = zoo.audit(vit, torch.optim.SGD(vit.parameters(), lr=0.1))
    assert lines(report, "note") == [
        "note: optimizer: head.bias: is frozen and in the optimizer, which leaves it as it is"
    ]
    assert report.errors == ()


def test_parameter_in_two_groups_is_an_error(vit) -> None:  # reported: facebookresearch/mmf#104
    optimizer = torch.optim.SGD(vit.parameters(), lr=0.1)
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [vit.head.bias]})
    assert "head.bias: is held 2 times, in group 0 and group 1: each step" in only_error(zoo.audit(vit, optimizer))


def test_wrapper_with_param_groups_is_an_optimizer(vit) -> None:
    wrapper = SimpleNamespace(param_groups=[{"params": [*vit.head.parameters()], "lr": 0.1}])
    assert len(zoo.audit(vit, wrapper).errors) == 30


def test_optimizer_made_before_the_head_was_replaced_is_named_by_both_sides(
    vit,
) -> None:  # reported: bubbliiiing/detr-pytorch#6
    optimizer = torch.optim.SGD(vit.parameters(), lr=0.1)
    vit.reset_classifier(5)
    errors = lines(zoo.audit(vit, optimizer))
    assert errors[0].startswith("error: optimizer: head.weight: is trainable and in no optimizer group")
    assert errors[2].startswith(
        "error: optimizer: group 0, tensor 30: of shape (3, 32) is held by the optimizer and is not"
    )
    assert len(errors) == 4


def test_orphan_of_the_same_shape_is_traced_to_its_successor(vit) -> None:
    optimizer = torch.optim.SGD(vit.parameters(), lr=0.1)
    vit.cls_token = nn.Parameter(vit.cls_token.detach().clone())
    assert "is it cls_token before that was replaced?" in str(zoo.audit(vit, optimizer))


def test_head_that_forward_does_not_use_is_named_at_step_0(vit, images) -> None:  # reported: pytorch/pytorch#43259
    vit.extra_head = nn.Linear(32, 5)
    errors = lines(zoo.audit(vit, torch.optim.SGD(vit.parameters(), lr=0.1), batch=images))
    assert [error.split(": is")[0] for error in errors] == [
        "error: probe: extra_head.weight",
        "error: probe: extra_head.bias",
    ]
    assert "forward does not use it, and DDP would fail on it" in errors[0]
    zoo.freeze(vit, "extra_head.weight")
    assert "extra_head.bias: is trainable and gets no gradient" in only_error(zoo.audit(vit, batch=images))
    zoo.freeze(vit, "extra_head")
    assert lines(zoo.audit(vit, batch=images)) == []


class Recreates(nn.Module):
    """Creates its weight anew, or draws it again in place, each time it runs."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_place:
            nn.init.normal_(self.weight)
        else:
            self.weight = nn.Parameter(torch.randn(4, 4))
        return x @ self.weight


@pytest.mark.parametrize(
    ("in_place", "message"), [(False, "is created anew in forward"), (True, "is written to in forward")]
)
def test_parameter_drawn_again_in_forward_is_named(in_place, message) -> None:
    model = Recreates(in_place=in_place)
    assert f"weight: {message}" in only_error(zoo.audit(model, batch=torch.ones(2, 4)))


def test_forward_cut_from_its_parameters_is_an_error() -> None:
    class Cut(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).detach()

    assert "depend on no trainable parameter" in only_error(zoo.audit(Cut(2, 2), batch=torch.ones(1, 2)))


def test_probe_leaves_model_gradients_buffers_and_random_streams_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).eval()
    model[0].weight.grad = torch.ones(4, 4)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    streams = torch.get_rng_state(), random.getstate()
    zoo.audit(model, batch=torch.randn(3, 4, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert random.getstate() == streams[1]
    assert not model.training
    torch.testing.assert_close(model[0].weight.grad, torch.ones(4, 4), rtol=0, atol=0)
    assert model[0].bias.grad is None
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, state[name], rtol=0, atol=0)


def test_probe_takes_forwards_arguments_as_a_tuple() -> None:
    model = nn.Bilinear(2, 3, 1)
    assert lines(zoo.audit(model, batch=(torch.ones(1, 2), torch.ones(1, 3)))) == []


def test_probe_of_a_wrong_batch_says_its_shape(vit) -> None:
    with pytest.raises(ZooError, match=r"probe failed on a batch of shape \[\(2, 3, 30, 30\)\]"):
        zoo.audit(vit, batch=torch.ones(2, 3, 30, 30))


def test_tied_tensor_is_counted_once_and_noted() -> None:
    model = nn.ModuleDict({"embed": nn.Linear(4, 3, bias=False), "head": nn.Linear(4, 3, bias=False)})
    model["head"].weight = model["embed"].weight
    report = zoo.audit(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert (report.parameters, report.elements, report.buffers) == (1, 12, 0)
    assert zoo.audit(nn.BatchNorm1d(2)).buffers == 3
    assert [str(finding) for finding in report.findings] == [
        "note: tie: head.weight: is one tensor with embed.weight, counted once"
    ]


def test_two_parameters_over_one_memory_are_a_warning_and_a_copy_is_a_note() -> None:
    model = nn.ParameterDict({"a": nn.Parameter(torch.randn(3, 2))})
    model["b"] = nn.Parameter(model["a"].data)
    assert lines(zoo.audit(model), "warning")[0].startswith("warning: tie: b: is another nn.Parameter over a's memory")
    model["b"] = nn.Parameter(model["a"].data.clone())
    assert lines(zoo.audit(model), "note") == [
        "note: tie: b: is an equal copy of a, not tied to it: two tensors that will part"
    ]


def test_parameter_that_is_not_contiguous_is_an_error_and_channels_last_is_none() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(2, 3).t())
    assert "weight: is not contiguous (shape (3, 2), strides (1, 3))" in only_error(zoo.audit(model))
    assert lines(zoo.audit(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last))) == []


@pytest.mark.parametrize(("value", "what"), [("nan", "NaN"), ("inf", "Inf"), ("-inf", "Inf")])
def test_value_that_is_not_finite_is_named(vit, value, what) -> None:
    vit.blocks[1].norm1.weight.data[3] = float(value)
    assert f"blocks.1.norm1.weight: holds {what}: 1 of 32 values" in only_error(zoo.audit(vit))


def test_nan_in_a_buffer_is_named_and_minus_inf_is_a_mask() -> None:
    model = nn.BatchNorm1d(2)
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    assert lines(zoo.audit(model)) == []
    model.running_var[0] = torch.nan
    assert "running_var: holds NaN: 1 of 2" in only_error(zoo.audit(model))


def test_compiled_wrapper_is_seen_through(vit) -> None:
    vit.head.weight.requires_grad_(False)
    wrapper = torch.nn.DataParallel(vit)
    assert only_error(zoo.audit(wrapper)).startswith("error: requires_grad: head.weight:")
