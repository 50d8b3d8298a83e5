"""Facts of the survey judged by the map: what is swappable, and the reason where it is not."""

import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch

import zoo
from zoo import backbones
from zoo.backbones import PLAIN, Backbone, judge, list_backbones, read_backbones, short_name
from zoo.errors import SwapError
from zoo.survey import Facts, Form, read_survey
from zoo.timm_map import REFUSED, ROWS, AttentionRow, Slot

ROOT = Path(__file__).parent.parent.parent
EVA = "timm.models.eva.EvaAttention"
FUSED = (("qkv", "Linear"), ("proj", "Linear"))
STANDARD = (
    "vision_transformer",
    "deit",
    "eva",
    "beit",
    "vision_transformer_relpos",
    "naflexvit",
    "swin_transformer",
    "swin_transformer_v2",
)


def facts(*forms: tuple[Form, int]) -> Facts:
    return Facts("some_model", "some", 10, 32, forms)


def form(name: str = PLAIN, layers: tuple[tuple[str, str], ...] = FUSED) -> Form:
    return Form(name, layers)


def test_a_model_whose_forms_all_fit_is_swappable_with_its_classes_counted() -> None:
    apart = form(EVA, (("q_proj", "Linear"), ("k_proj", "Linear"), ("v_proj", "Linear"), ("proj", "Linear")))
    told = judge(facts((form(EVA), 2), (form(), 3), (apart, 1)))
    assert told == Backbone("some_model", "some", 10, 32, ((EVA, 3), (PLAIN, 3)), None)
    assert (told.is_swappable, told.is_plain) == (True, False)
    assert judge(facts((form(), 3))).is_plain


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (form("timm.models.maxxvit.Attention2d"), f"maxxvit.Attention2d: {REFUSED['timm.models.maxxvit.Attention2d']}"),
        (form("timm.models.new.Attn"), "new.Attn: no row in zoo.timm_map"),
        (form(layers=(("qkv", "Conv2d"), ("proj", "Linear"))), "attention.Attention: its qkv is Conv2d, not nn.Linear"),
        (form(layers=(("qkv", "Linear"), ("proj", "Odd"))), "attention.Attention: its proj is Odd, not nn.Linear"),
        (
            form(layers=(("qkv.0", "Linear"), ("qkv.1", "Linear"))),
            "attention.Attention: its qkv is several layers, not nn.Linear",
        ),
        (
            form(layers=(("to_qkv", "Linear"),)),
            "attention.Attention: none of its row's children is there, it has to_qkv",
        ),
        (form(layers=()), "attention.Attention: none of its row's children is there, it has no layers"),
    ],
)
def test_one_form_that_does_not_fit_is_the_reason(bad: Form, reason: str) -> None:
    told = judge(facts((form(), 11), (bad, 1)))
    assert told.reason == reason
    assert (told.is_swappable, told.is_plain) == (False, False)


def test_classes_with_one_reason_are_told_together() -> None:
    names = ("timm.models.efficientformer_v2.Attention2d", "timm.models.efficientformer_v2.Attention2dDownsample")
    told = judge(facts(*((form(name), 1) for name in names)))
    assert told.reason == (
        "efficientformer_v2.Attention2d, efficientformer_v2.Attention2dDownsample: its projections are 1x1 "
        "convolutions, not nn.Linear"
    )


def test_a_new_row_needs_no_new_survey(monkeypatch: pytest.MonkeyPatch) -> None:
    new = form("timm.models.new.Attn", (("w", "Linear"),))
    assert not judge(facts((new, 1))).is_swappable
    monkeypatch.setitem(ROWS, "timm.models.new.Attn", AttentionRow((Slot("w", ("out",)),)))
    assert judge(facts((new, 1))).is_swappable


def test_at_least_570_of_timms_690_models_are_swappable() -> None:
    assert len(read_backbones()) >= 690
    assert len(list_backbones()) >= 570


@pytest.mark.parametrize("family", STANDARD)
def test_every_model_of_a_standard_family_is_swappable(family: str) -> None:
    of_it = [backbone for backbone in read_backbones() if backbone.family == family]
    assert of_it
    assert [backbone.name for backbone in of_it if not backbone.is_swappable] == []


def test_list_backbones_takes_a_glob_and_names_only_what_swaps() -> None:
    names = zoo.list_backbones("vit_tiny*")
    assert "vit_tiny_patch16_224" in names
    assert all(name.startswith("vit_tiny") for name in names)
    assert list(names) == sorted(names)
    assert list_backbones("coatnet_pico_rw_224") == ()
    assert list_backbones("nothing_of_the_kind") == ()


def test_every_name_is_one_of_timms() -> None:
    assert set(list_backbones()) <= set(timm.list_models())


def test_reading_the_list_imports_neither_torch_nor_timm() -> None:
    code = "import sys, zoo; zoo.list_backbones(); print({'torch', 'timm'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_class_is_told_from_its_namesakes_by_its_file() -> None:
    assert short_name("timm.models.beit.Attention") == "beit.Attention"
    assert short_name("Attention") == "Attention"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reason", "name"), {backbone.reason: backbone.name for backbone in read_backbones()}.items(), ids=str
)
def test_a_verdict_is_what_a_swap_says(reason: str | None, name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    if reason is None:
        zoo.swap_attention(model, "parameter")
    else:
        with pytest.raises(SwapError, match="cannot swap"):
            zoo.swap_attention(model, "parameter")


@pytest.mark.slow
def test_a_whole_module_stands_in_where_the_list_says_so() -> None:
    plain = {facts.attention: facts.name for facts in read_survey().models if judge(facts).is_plain}
    for name in plain.values():
        with torch.device("meta"):
            model = timm.create_model(name)
        for path, module in model.named_modules():
            if f"{type(module).__module__}.{type(module).__qualname__}" == backbones.PLAIN:
                zoo.Attention.check_spec(zoo.attention.AttentionSpec.read(module), path)
