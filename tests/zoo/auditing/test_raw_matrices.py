"""Raw matrices in a module of nobody's class: the fault is a unit normal draw, and only of more than one."""

import math

import pytest
import torch
from torch import Tensor, nn

import zoo


class HandWritten(nn.Module):
    """Attention with raw matrices for q, k and v, as people write it."""

    def __init__(self, dim: int = 64, std: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wq, self.wk, self.wv = (nn.Parameter(std * torch.randn(dim, dim)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x @ self.wq, x @ self.wk, x @ self.wv)


class Tables(nn.Module):
    """Any parameters by their names."""

    def __init__(self, **parameters: Tensor) -> None:
        super().__init__()
        for name, values in parameters.items():
            setattr(self, name, nn.Parameter(values, requires_grad=values.is_floating_point()))


def told(model: nn.Module) -> list[str]:
    return [str(finding) for finding in zoo.audit(model).findings if finding.check == "scale"]


def test_unit_normal_draw_is_named_with_its_parameters_and_the_way_out() -> None:
    model = nn.Sequential(nn.Linear(384, 384), HandWritten(384))
    report = zoo.audit(model)
    (finding,) = report.findings
    assert (finding.check, finding.severity, finding.tensor) == ("scale", "warning", "1")
    assert "wq has std 1 (expected 1/sqrt(3*384) = 0.0295), wk has std 1 (" in finding.message
    assert "nn.init.normal_(parameter, std=expected)" in finding.message
    for parameter in model[1].parameters():
        nn.init.normal_(parameter, std=0.0295)
    assert zoo.audit(model).findings == ()


def test_each_module_is_one_finding_and_many_matrices_are_counted() -> None:
    many = nn.ParameterList([nn.Parameter(torch.randn(32, 32)) for _ in range(7)])
    found = told(nn.ModuleList([HandWritten(), HandWritten(), many]))
    assert [line.split(": ")[2] for line in found] == ["0", "1", "2"]
    assert "3 has std" in found[2]
    assert "and 3 others: their products" in found[2]


@pytest.mark.parametrize(("times", "alarms"), [(0.58, 0), (3.7, 0), (4.3, 1), (8.0, 1)])
def test_bound_is_four_over_the_root_of_the_width(times, alarms) -> None:
    assert len(told(HandWritten(64, times / 8))) == alarms


@pytest.mark.parametrize(
    "parameters",
    [
        {"pos_embed": torch.randn(197, 64)},
        {"pos_embed": torch.randn(1, 197, 64), "table": torch.randn(64, 64)},
        {"wide": torch.randn(64, 64), "narrow": torch.randn(15, 64)},
        {"wide": torch.randn(64, 64), "linear": torch.randn(64, 64) / math.sqrt(64)},
        {"mask": torch.ones(64, 64), "other": 5 * torch.ones(64, 64)},
        {"codes": torch.randint(99, (64, 64)), "others": torch.randint(99, (64, 64))},
    ],
)
def test_tables_and_lone_matrices_raise_no_alarm(parameters) -> None:
    torch.manual_seed(0)
    assert told(Tables(**parameters)) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_matrices_of_a_small_dtype_are_read(dtype) -> None:
    assert len(told(Tables(a=torch.randn(64, 64).to(dtype), b=torch.randn(64, 64).to(dtype)))) == 1


def test_one_matrix_under_two_names_is_one() -> None:
    model = Tables(a=torch.randn(64, 64))
    model.b = model.a
    assert told(model) == []


def test_matrices_on_meta_and_not_finite_are_left_to_others() -> None:
    meta = Tables(a=torch.randn(64, 64), b=torch.randn(64, 64)).to("meta")
    spoiled = HandWritten()
    with torch.no_grad():
        for parameter in spoiled.parameters():
            parameter[0, 0] = math.nan
    assert told(meta) == told(spoiled) == []


@pytest.mark.parametrize("layer", [nn.Bilinear(64, 64, 2), nn.Embedding(64, 64), nn.MultiheadAttention(64, 2, kdim=32)])
def test_layers_of_torch_raise_no_alarm(layer) -> None:
    assert told(layer) == []


def test_our_projections_are_left_to_the_check_of_attention(model) -> None:
    with torch.no_grad():
        for part in ("to_q", "to_k", "to_v"):
            getattr(model.blocks[0].attn.qkv, part).normal_()
    (found,) = told(model)
    assert found.startswith("warning: scale: blocks.0.attn: attention logits have std")
