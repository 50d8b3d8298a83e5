"""All of timm's models: the packaged survey is true of the installed timm, and what it says can be swapped can be."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import timm
import torch
from timm.models import _registry, nest, register_model
from torch import nn
from torch.overrides import TorchFunctionMode

import zoo
import zoo.survey
import zoo.swap
from zoo.backbones import judge
from zoo.errors import SwapError
from zoo.projections import ParameterProjection, SeparateProjection
from zoo.slots import find_places, iter_attentions, iter_claims
from zoo.survey import Facts, Form, Survey, look_at, read_survey, write_survey
from zoo.timm_map import REFUSED

# What is drawn on the meta device is never seen, and drawing takes four fifths of the time that building takes there.
DRAWS = {"add_", "clamp_", "copy_", "div_", "erfinv_", "fill_", "mul_", "normal_", "sub_", "uniform_", "zero_"}
DRAWS |= {"trunc_normal_"}

SWAPPED, REFUSED_MODELS = 581, 109
FAMILIES = {
    "plain ViTs": ("vit_*", "flexivit_*", "aimv2_*", "test_vit*", "vitamin_*", "pit_*", "samvit_*"),
    "DeiT": ("deit_*", "deit3_*"),
    "rope": ("vit_*_rope_*", "deepseek_vit_*", "qwen3_vit_*", "*sapiens2*"),
    "EVA": ("eva_*", "eva02_*"),
    "BEiT": ("beit_*", "beitv2_*", "beit3_*"),
    "relative position": ("vit_relpos_*", "vit_srelpos_*"),
    "DINOv2": ("*dinov2*",),
    "DINOv3": ("vit_*dinov3*",),
    "SigLIP": ("*siglip*",),
    "CLIP": ("vit_*clip*", "eva02_*clip*"),
    "NaFlex": ("naflexvit_*",),
    "hybrids": ("vit_*_r*_s*", "vit_*_r50_*", "vit_*_resnet*"),
    "parallel blocks": ("vit_*x2_224",),
    "parallel scaling": ("vit_*_xp_*", "vit_pwee_*", "vit_dpwee_*"),
    "differential": ("vit_dwee_*", "vit_dlittle_*"),
}


class _NoDraws(TorchFunctionMode):
    """Leave tensors of the meta device as they are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensor = args[0] if args else (kwargs or {}).get("tensor")
        if getattr(func, "__name__", "") in DRAWS and isinstance(tensor, torch.Tensor) and tensor.is_meta:
            return tensor
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Visit:
    """What was found in one timm model: its facts, why it was refused (None: it was swapped), and what went wrong."""

    facts: Facts
    refusal: str | None
    faults: tuple[str, ...] = ()


def visit(name: str) -> Visit:
    """Build a timm model once, look at it, and swap it through every built-in variant and back."""
    with torch.device("meta"), _NoDraws():
        model = timm.create_model(name)
    with mock.patch.object(timm, "create_model", return_value=model):
        facts = look_at(name)
    if not facts.attention:
        return Visit(facts, None)
    before = state_of(model)
    faults: list[str] = []
    try:
        names = [name for name, _ in iter_claims(model)]
        for variant in ("separate", "parameter"):
            faults += swap_faults(model, variant, names)
        zoo.restore_attention(model)
    except SwapError as error:
        refusal = str(error)
    else:
        refusal = None
    if state_of(model) != before:
        faults.append("is another model after " + ("the refusal" if refusal else "the restore"))
    return Visit(facts, refusal, tuple(faults))


def swap_faults(model: nn.Module, variant: str, names: list[str]) -> Iterator[str]:
    """Swap a model and yield every attention, and every projection in one, that was not swapped."""
    report = zoo.swap_attention(model, variant)
    if list(report.modules) != names or report.left:
        yield f"{variant}: swapped {len(report.modules)} of {len(names)} attention modules"
    for name, attention in iter_attentions(model):
        for place in find_places(attention, name):
            single = variant == "separate" and len(place.layout.parts) == 1
            wanted = (
                nn.Linear if single else {"separate": SeparateProjection, "parameter": ParameterProjection}[variant]
            )
            if type(place.child) is not wanted:
                yield f"{variant}: {place.name} is {type(place.child).__name__}"


def state_of(model: nn.Module) -> list[tuple[str, object, torch.dtype]]:
    return [(name, tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()]


def visit_share(accelerator: Any, ranks: int, every: int) -> list[Any]:
    """Visit this rank's share of timm's models, or of each `every`-th; give those with attention as JSON values."""
    names = timm.list_models()[::every][accelerator.process_index :: ranks]
    visits = [visit(name) for name in names]
    return [[v.refusal, v.faults, to_json(v.facts)] for v in visits if v.facts.attention]


def to_json(facts: Facts) -> list[Any]:
    attention = [[form.name, form.layers, count] for form, count in facts.attention]
    return [facts.name, facts.family, facts.parameters, facts.img_size, attention]


def from_json(name: str, family: str, parameters: int, img_size: int | None, attention: list[Any]) -> Facts:
    forms = [(Form(cls, tuple(map(tuple, layers))), count) for cls, layers, count in attention]  # type: ignore[misc]
    return Facts(name, family, parameters, img_size, tuple(forms))


def differences(found: Survey, packaged: Survey) -> list[str]:
    """Name what is new, gone or other in timm, a line for each model; the classes of attention first."""
    if found.timm != packaged.timm:
        return [f"zoo/survey.json is of timm {packaged.timm}, {found.timm} is installed"]
    ours, theirs = ({facts.name: facts for facts in survey.models} for survey in (packaged, found))
    forms, known = ({form for facts in survey.models for form, _ in facts.attention} for survey in (found, packaged))
    lines = [f"attention {form.name} with {dict(form.layers)} is new" for form in sorted(forms - known, key=str)]
    lines += [f"attention {form.name} with {dict(form.layers)} is gone" for form in sorted(known - forms, key=str)]
    lines += [f"{name} is new, with {classes(theirs[name])}" for name in sorted(theirs.keys() - ours.keys())]
    lines += [f"{name} is gone" for name in sorted(ours.keys() - theirs.keys())]
    for name in sorted(ours.keys() & theirs.keys()):
        changed = [key for key in vars(ours[name]) if getattr(ours[name], key) != getattr(theirs[name], key)]
        lines += [f"{name} has another {key}" for key in changed]
    return lines


def classes(facts: Facts) -> str:
    return ", ".join(sorted({form.name for form, _ in facts.attention}))


def check_survey(found: Survey) -> None:
    lines = differences(found, read_survey())
    if lines:
        pytest.fail("\n".join(["run `python -m zoo.survey`, and look at each change:", *lines]))


@pytest.fixture(scope="module")
def visits(run_ranks: Callable[..., Any]) -> dict[str, Visit]:
    """Every timm model that has attention, visited by two processes."""
    outcomes = run_ranks(visit_share, world_size=2, timeout_s=1800, ranks=2, every=1)
    assert [outcome.message for outcome in outcomes] == ["", ""], outcomes[0].traceback + outcomes[1].traceback
    values = [value for outcome in outcomes for value in outcome.value]
    found = [Visit(from_json(*facts), refusal, tuple(faults)) for refusal, faults, facts in values]
    return {visited.facts.name: visited for visited in sorted(found, key=lambda visited: visited.facts.name)}


@pytest.mark.slow
def test_the_packaged_survey_is_what_the_installed_timm_has(visits: dict[str, Visit]) -> None:
    check_survey(Survey(timm.__version__, tuple(visited.facts for visited in visits.values())))


@pytest.mark.slow
def test_every_model_swaps_to_every_variant_and_back_or_is_refused(visits: dict[str, Visit]) -> None:
    assert {name: visited.faults for name, visited in visits.items() if visited.faults} == {}
    swapped = [name for name, visited in visits.items() if visited.refusal is None]
    assert (len(swapped), len(visits)) == (SWAPPED, SWAPPED + REFUSED_MODELS)


@pytest.mark.slow
def test_the_survey_judges_every_model_as_the_swap_does(visits: dict[str, Visit]) -> None:
    for name, visited in visits.items():
        judged = judge(visited.facts)
        assert judged.is_swappable == (visited.refusal is None), (name, judged.reason, visited.refusal)
        if visited.refusal is not None:
            assert "nothing was changed" in visited.refusal
            assert any(reason in visited.refusal for reason in (*REFUSED.values(), "Conv2d, only nn.Linear")), name


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_standard_family_swaps_without_exception(visits: dict[str, Visit], family: str) -> None:
    for pattern in FAMILIES[family]:
        members = [visited for name, visited in visits.items() if fnmatchcase(name, pattern)]
        assert members, pattern
        assert [visited.facts.name for visited in members if visited.refusal is not None] == [], pattern


@pytest.fixture
def own_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test register timm models that are gone when it ends."""
    for name in ("_model_entrypoints", "_model_to_module", "_module_to_models", "_model_default_cfgs"):
        monkeypatch.setattr(_registry, name, copy.deepcopy(getattr(_registry, name)))


class FreshAttention(nn.Module):
    """Attention that a new timm might bring."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)


def fresh_vit(**_: Any) -> nn.Module:
    model = timm.create_model("vit_tiny_patch16_224", embed_dim=32, depth=1, num_heads=2, num_classes=3)
    model.blocks[0].attn = FreshAttention(32)
    return model


@pytest.mark.usefixtures("own_timm")
def test_a_new_model_of_a_new_class_is_named() -> None:
    register_model(fresh_vit)
    visited, packaged = visit("fresh_vit"), read_survey()
    assert "cannot swap FreshAttention, no row in zoo.timm_map" in str(visited.refusal)
    assert visited.faults == ()
    with pytest.raises(pytest.fail.Exception) as failure:
        check_survey(replace(packaged, models=(*packaged.models, visited.facts)))
    lines = str(failure.value).splitlines()
    assert lines[0] == "run `python -m zoo.survey`, and look at each change:"
    assert lines[1].endswith("test_survey.FreshAttention with {'qkv': 'Linear'} is new")
    assert lines[2].startswith("fresh_vit is new, with ")
    assert len(lines) == 3


def test_a_renamed_child_is_named_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    original = nest.Attention.__init__

    def renamed(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.in_proj = self._modules.pop("qkv")

    monkeypatch.setattr(nest.Attention, "__init__", renamed)
    visited, packaged = visit("nest_tiny"), read_survey()
    assert visited.refusal == (
        "levels.0.transformer_encoder.0.attn: Attention has no qkv for k, as its row in zoo.timm_map says; this timm "
        "may have changed the class; nothing was changed"
    )
    changed = tuple(visited.facts if facts.name == "nest_tiny" else facts for facts in packaged.models)
    assert differences(replace(packaged, models=changed), packaged) == [
        "attention timm.models.nest.Attention with {'proj': 'Linear', 'in_proj': 'Linear'} is new",
        "nest_tiny has another attention",
    ]


def test_a_vanished_or_changed_model_and_another_timm_are_named() -> None:
    packaged = read_survey()
    fewer = tuple(facts for facts in packaged.models if facts.name != "vit_tiny_patch16_224")
    assert differences(replace(packaged, models=fewer), packaged) == ["vit_tiny_patch16_224 is gone"]
    larger = tuple(
        replace(facts, parameters=1) if facts.name == "vit_tiny_patch16_224" else facts for facts in packaged.models
    )
    assert differences(replace(packaged, models=larger), packaged) == ["vit_tiny_patch16_224 has another parameters"]
    assert differences(replace(packaged, timm="9.9"), packaged) == [
        f"zoo/survey.json is of timm {packaged.timm}, 9.9 is installed"
    ]
    assert differences(packaged, packaged) == []


def test_the_packaged_survey_is_of_the_installed_timm() -> None:
    assert read_survey().timm == timm.__version__


def test_a_survey_comes_back_from_its_file(tmp_path: Path) -> None:
    packaged = read_survey()
    write_survey(packaged, tmp_path / "survey.json")
    assert (tmp_path / "survey.json").read_bytes() == (Path(zoo.survey.__file__).parent / "survey.json").read_bytes()


def test_skipped_draws_leave_the_model_as_timm_builds_it() -> None:
    assert visit("test_vit").facts == look_at("test_vit")


@pytest.mark.parametrize("fault", ["left", "kept"])
def test_an_attention_that_is_left_is_a_fault(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    with torch.device("meta"):
        model = timm.create_model("test_vit")
    names = [name for name, _ in iter_claims(model)]
    if fault == "left":
        assert list(swap_faults(model, "separate", [*names, "blocks.9.attn"])) == [
            f"separate: swapped {len(names)} of {len(names) + 1} attention modules"
        ]
    else:
        monkeypatch.setattr(zoo, "swap_attention", lambda *_: zoo.swap.SwapReport("parameter", tuple(names)))
        assert next(swap_faults(model, "parameter", names)) == f"parameter: {names[0]}.qkv is Linear"
