"""Which backbones a user's words choose, and how the list is told."""

import copy
import json

import pytest
import timm
from timm.models import _registry, register_model
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import zoo
from zoo.backbones import PLAIN, Backbone, read_backbones
from zoo.commands import listing
from zoo.commands.listing import (
    describe_difference,
    find_backbones,
    format_backbones,
    judge_for,
    select_class,
    select_family,
    to_dict,
)
from zoo.errors import BackboneError, SwapError, UnknownNameError, ZooError
from zoo.projections import SeparateProjection

YES = Backbone("vit_a", "vision_transformer", 5_717_416, 224, ((PLAIN, 12),))
NO = Backbone(
    "conv_b", "maxxvit", 31_000_000, None, (("timm.models.maxxvit.Attention2d", 2),), "maxxvit.Attention2d: no"
)


def names(backbones: tuple[Backbone, ...]) -> list[str]:
    return [backbone.name for backbone in backbones]


@pytest.fixture
def own_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test register models with timm that are gone when it ends."""
    for table in ("_model_entrypoints", "_model_to_module", "_module_to_models"):
        monkeypatch.setattr(_registry, table, copy.deepcopy(getattr(_registry, table)))


def test_no_pattern_finds_every_model() -> None:
    assert find_backbones([]) == read_backbones()


def test_patterns_add_up_each_model_once_in_order() -> None:
    assert names(find_backbones(["vit_tiny_patch16_*", "deit_tiny_patch16_224", "vit_tiny_patch16_224"])) == [
        "deit_tiny_patch16_224",
        "vit_tiny_patch16_224",
        "vit_tiny_patch16_384",
        "vit_tiny_patch16_dinov3_qkvb",
    ]


def test_a_pretrained_tag_is_taken_off_if_timm_has_it() -> None:
    assert names(find_backbones(["vit_tiny_patch16_224.augreg_in21k"])) == ["vit_tiny_patch16_224"]
    with pytest.raises(UnknownNameError, match=r"'vit_tiny_patch16_224\.augreg_in21', did you mean .*augreg_in21k'"):
        find_backbones(["vit_tiny_patch16_224.augreg_in21"])


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("vit_tinny_patch16_224", "unknown model 'vit_tinny_patch16_224', did you mean 'vit_tiny_patch16_224'"),
        ("vit_tiny", "no timm model is called 'vit_tiny'; 'vit_tiny\\*' names 5 with attention"),
        ("tiny_patch16", "no timm model is called 'tiny_patch16'; '\\*tiny_patch16\\*' names"),
        ("resnet50", "resnet50 is a timm model without attention"),
        ("resnet5*", "'resnet5\\*' names .* timm models such as resnet50, none with attention"),
        ("", "unknown model ''; a pattern is a timm name or a glob"),
        ("  ", "unknown model '  '"),
        ("日本", "unknown model '日本'"),
        ("no_such*", "unknown model 'no_such\\*'"),
    ],
)
def test_a_pattern_that_names_nothing_is_an_error_with_a_way_out(pattern: str, said: str) -> None:
    with pytest.raises(ZooError, match=f"^{said}"):
        find_backbones(["vit_tiny*", pattern])


@pytest.mark.usefixtures("own_models")
def test_a_model_that_the_survey_does_not_know_is_looked_at_by_name() -> None:
    @register_model
    def my_small_vit(pretrained: bool = False, **kwargs: object) -> nn.Module:  # noqa: ARG001
        return VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2)

    assert timm.is_model("my_small_vit")
    (told,) = find_backbones(["my_small_vit"])
    assert (told.attention, told.is_swappable, told.img_size) == (((PLAIN, 2),), True, None)
    assert " -  yes" in format_backbones([told])
    assert names(select_family([told], "vision_transformer")) == ["my_small_vit"]


@pytest.mark.usefixtures("own_models")
def test_a_model_that_cannot_be_built_to_look_at_is_one_line() -> None:
    @register_model
    def my_broken_vit(pretrained: bool = False, **kwargs: object) -> nn.Module:  # noqa: ARG001
        raise RuntimeError("no weights\nanywhere")

    with pytest.raises(BackboneError, match=r"^my_broken_vit: cannot be built to look at: RuntimeError: no weights$"):
        find_backbones(["my_broken_vit"])


def test_a_family_is_a_file_of_timms() -> None:
    assert {backbone.family for backbone in select_family(read_backbones(), "swin_*")} == {
        "swin_transformer",
        "swin_transformer_v2",
        "swin_transformer_v2_cr",
    }
    assert select_family([YES], "eva") == ()
    with pytest.raises(UnknownNameError, match="unknown family 'swin', did you mean"):
        select_family(read_backbones(), "swin")


@pytest.mark.parametrize("cls", ["EvaAttention", "eva.EvaAttention", "timm.models.eva.EvaAttention", "eva.*"])
def test_a_class_is_given_by_its_name_its_file_or_in_full(cls: str) -> None:
    found = select_class(read_backbones(), cls)
    assert "eva02_tiny_patch14_224" in names(found)
    assert {name for backbone in found for name, _ in backbone.attention} == {"timm.models.eva.EvaAttention"}
    with pytest.raises(UnknownNameError, match="unknown attention class 'EvaAttn', did you mean 'EvaAttention'"):
        select_class(read_backbones(), "EvaAttn")


@pytest.mark.usefixtures("own_registry")
def test_a_whole_module_fits_plain_attention_alone() -> None:
    zoo.register_attention("whole")(type("Whole", (zoo.Attention,), {}))
    zoo.register_attention("pair")(type("Pair", (SeparateProjection,), {}))
    zoo.register_attention("neither")(type("Neither", (nn.Module,), {}))
    found = find_backbones(["vit_tiny_patch16_224", "eva02_tiny_patch14_224", "coatnet_pico_rw_224"])
    told = {backbone.name: backbone.reason for backbone in judge_for(found, "whole")}
    assert told["vit_tiny_patch16_224"] is None
    assert told["eva02_tiny_patch14_224"] == (
        "eva.EvaAttention: whole is a whole module, which stands in for attention.Attention alone"
    )
    assert told["coatnet_pico_rw_224"] == {b.name: b.reason for b in found}["coatnet_pico_rw_224"]
    assert judge_for(found, "pair") == judge_for(found, "linear") == found
    with pytest.raises(SwapError, match="Neither is neither a zoo"):
        judge_for(found, "neither")
    with pytest.raises(UnknownNameError, match="unknown attention 'wole', did you mean 'whole'"):
        judge_for(found, "wole")


def test_another_timm_than_the_surveys_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe_difference() == ""
    monkeypatch.setattr(listing, "version", lambda _: "9.9.9")
    assert describe_difference().startswith("timm 9.9.9 is installed, and this list is of timm 1.0.")


def test_the_table_counts_at_its_end() -> None:
    assert format_backbones([NO, YES]).splitlines() == [
        "MODEL   PARAMS  IMAGE  SWAP  ATTENTION, OR WHY NOT",
        "conv_b   31.0M      -  no    maxxvit.Attention2d: no",
        "vit_a     5.7M    224  yes   12 attention.Attention",
        f"2 models: 1 swappable, 1 not; timm {listing.read_survey().timm}",
    ]
    assert format_backbones([]).startswith("0 models: 0 swappable, 0 not;")


def test_the_table_fits_a_terminal() -> None:
    for width in (80, 100, 120):
        lines = format_backbones(read_backbones(), width=width).splitlines()
        assert max(map(len, lines)) <= width
    assert len(format_backbones(read_backbones()).splitlines()) == len(read_backbones()) + 2


def test_json_holds_everything() -> None:
    told = json.loads(json.dumps(to_dict([NO, YES])))
    assert (told["swappable"], told["refused"], told["timm"]) == (1, 1, timm.__version__)
    assert told["models"][0] == {
        "name": "conv_b",
        "family": "maxxvit",
        "parameters": 31_000_000,
        "img_size": None,
        "attention": {"timm.models.maxxvit.Attention2d": 2},
        "reason": "maxxvit.Attention2d: no",
        "swappable": False,
    }
