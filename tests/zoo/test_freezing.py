import copy
from collections.abc import Iterator

import pytest
import timm
import torch
from torch import distributed, nn

import zoo
from zoo.errors import UnknownNameError, ZooError
from zoo.freezing import check_trainable, find_frozen


@pytest.fixture
def vit() -> nn.Module:
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=3
    )


def frozen(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters(remove_duplicate=False) if not parameter.requires_grad}


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("head.bias", {"head.bias"}),
        ("head", {"head.weight", "head.bias"}),
        ("patch_embed", {"patch_embed.proj.weight", "patch_embed.proj.bias"}),
        ("blocks.*.attn.qkv", {f"blocks.{i}.attn.qkv.{part}" for i in (0, 1) for part in ("weight", "bias")}),
        ("*.attn.proj.weight", {"blocks.0.attn.proj.weight", "blocks.1.attn.proj.weight"}),
        (["cls_token", "pos_*"], {"cls_token", "pos_embed"}),
    ],
)
def test_pattern_names_parameters_or_all_below_a_module(vit, pattern, names) -> None:
    assert set(zoo.freeze(vit, pattern)) == names
    assert frozen(vit) == names
    assert find_frozen(vit) == names


def test_module_path_is_no_prefix_of_its_neighbours_name() -> None:
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=16, embed_dim=8, depth=11, num_heads=2, num_classes=3
    )
    assert all(name.startswith("blocks.1.") for name in zoo.freeze(model, "blocks.1"))


def test_names_come_in_the_models_order(vit) -> None:
    names = zoo.freeze(vit, ["head", "cls_token"])
    assert names == ("cls_token", "head.weight", "head.bias")


def test_pattern_that_names_nothing_gives_the_nearest_and_changes_nothing(vit) -> None:
    with pytest.raises(UnknownNameError, match=r"unknown pattern 'blocks\.0\.atn', did you mean .*'blocks\.0\.attn'"):
        zoo.freeze(vit, ["head", "blocks.0.atn"])
    assert frozen(vit) == set()
    assert find_frozen(vit) == set()


@pytest.mark.parametrize("pattern", ["all", "*"])
def test_everything_has_two_names(vit, pattern) -> None:
    assert set(zoo.freeze(vit, pattern)) == {name for name, _ in vit.named_parameters()}


def test_all_but_the_head_learns_the_head_alone(vit) -> None:
    zoo.freeze(vit, "all but head")
    assert {name for name, parameter in vit.named_parameters() if parameter.requires_grad} == {
        "head.weight",
        "head.bias",
    }


@pytest.mark.parametrize(("pattern", "blocks"), [("blocks.0-0", {0}), ("blocks.0-1", {0, 1}), ("blocks.1-", {1})])
def test_depth_counts_from_zero_and_takes_both_ends(vit, pattern, blocks) -> None:
    zoo.freeze(vit, pattern)
    assert frozen(vit) == {
        name for name, _ in vit.named_parameters() if name.startswith(tuple(f"blocks.{i}." for i in blocks))
    }


def test_depth_beyond_the_model_changes_nothing(vit) -> None:
    with pytest.raises(UnknownNameError, match=r"unknown pattern 'blocks\.0-5'.*blocks holds 2, 0 to 1"):
        zoo.freeze(vit, ["head", "blocks.0-5"])
    assert frozen(vit) == set()


def test_unfreeze_takes_depth_too(vit) -> None:
    zoo.freeze(vit, "all")
    zoo.unfreeze(vit, ["blocks.1-", "head"])
    assert frozen(vit) == {name for name, _ in vit.named_parameters() if not name.startswith(("blocks.1.", "head."))}
    assert find_frozen(vit) == frozen(vit)


def test_unfreeze_takes_back_what_it_names(vit) -> None:
    zoo.freeze(vit, "*")
    assert zoo.unfreeze(vit, "head") == ("head.weight", "head.bias")
    assert {"head.weight", "head.bias"}.isdisjoint(frozen(vit) | find_frozen(vit))
    assert "cls_token" in frozen(vit) & find_frozen(vit)


def test_unfreeze_of_nothing_is_an_error(vit) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'head'"):
        zoo.unfreeze(vit, "heads")


def test_freeze_through_a_part_is_known_to_the_whole_and_taken_back_by_it(vit) -> None:
    zoo.freeze(vit.blocks[0], "attn")
    assert "blocks.0.attn.qkv.weight" in find_frozen(vit)
    zoo.unfreeze(vit, "blocks")
    assert find_frozen(vit) == set()


def test_tied_parameter_is_frozen_under_both_names() -> None:
    model = nn.ModuleDict({"embed": nn.Linear(4, 3, bias=False), "head": nn.Linear(4, 3, bias=False)})
    model["head"].weight = model["embed"].weight
    assert zoo.freeze(model, "head") == ("embed.weight", "head.weight")
    assert find_frozen(model) == {"embed.weight", "head.weight"}


def test_copy_remembers_and_is_its_own(vit) -> None:
    zoo.freeze(vit, "head")
    other = copy.deepcopy(vit)
    zoo.freeze(other, "cls_token")
    assert find_frozen(vit) == {"head.weight", "head.bias"}
    assert find_frozen(other) == {"head.weight", "head.bias", "cls_token"}


def test_integers_cannot_be_unfrozen() -> None:
    model = nn.Linear(2, 2)
    model.steps = nn.Parameter(torch.zeros(1, dtype=torch.int64), requires_grad=False)
    zoo.freeze(model, "*")
    with pytest.raises(ZooError, match=r"steps is of dtype torch\.int64"):
        zoo.unfreeze(model, "*")
    assert frozen(model) == {"weight", "bias", "steps"}


@pytest.mark.parametrize("attention", ["linear", "separate", "parameter"])
def test_freeze_is_remembered_through_a_swap_that_renames_its_parameters(vit, attention) -> None:
    zoo.freeze(vit, "blocks.0.attn")
    zoo.swap_attention(vit, attention)
    assert find_frozen(vit) == frozen(vit)
    assert not zoo.audit(vit).errors
    zoo.restore_attention(vit)
    assert (
        find_frozen(vit)
        == frozen(vit)
        == {f"blocks.0.attn.{n}.{k}" for n in ("qkv", "proj") for k in ("weight", "bias")}
    )
    zoo.swap_attention(vit, attention)
    zoo.unfreeze(vit, "blocks.0")
    assert find_frozen(vit) == frozen(vit) == set()


def test_swap_of_a_half_frozen_projection_is_remembered_by_half(vit) -> None:
    zoo.freeze(vit, "blocks.0.attn.qkv.weight")
    zoo.swap_attention(vit, "parameter")
    assert find_frozen(vit) == frozen(vit) == {f"blocks.0.attn.qkv.to_{part}" for part in "qkv"}


def test_unnamed_freeze_of_a_swapped_projection_is_still_an_accident(vit) -> None:
    zoo.freeze(vit, "blocks.0.attn")
    zoo.swap_attention(vit, "parameter")
    vit.blocks[1].attn.qkv.to_q.requires_grad_(False)
    assert [finding.tensor for finding in zoo.audit(vit).errors] == ["blocks.1.attn.qkv.to_q"]


def test_everything_frozen_is_said_plainly(vit) -> None:
    check_trainable(vit)
    zoo.freeze(vit, "*")
    with pytest.raises(ZooError, match=r"no trainable parameters: all 32 are frozen, 32 of them by a freeze pattern"):
        check_trainable(vit)


@pytest.fixture
def group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("act", [zoo.freeze, zoo.unfreeze])
@pytest.mark.parametrize(
    ("wrap", "kind"),
    [
        (nn.parallel.DistributedDataParallel, "the model is a wrapper, DistributedDataParallel"),
        (nn.DataParallel, "the model is a wrapper, DataParallel"),
        (lambda model: torch.compile(model, backend="eager"), "the model is a wrapper, OptimizedModule"),
        (lambda model: nn.Sequential(nn.DataParallel(model)), "0 is a wrapper, DataParallel"),
    ],
)
def test_wrapped_model_is_refused_and_left_as_it_was(vit, act, wrap, kind) -> None:
    wrapped = wrap(vit)
    with pytest.raises(ZooError, match=rf"^{act.__name__} before the model is wrapped: {kind}: .*; {act.__name__} the"):
        act(wrapped, "*blocks.0*")
    assert frozen(vit) == set()
    assert find_frozen(wrapped) == set()


def test_model_frozen_before_it_is_wrapped_raises_no_alarm(vit) -> None:
    zoo.freeze(vit, "blocks.0")
    assert zoo.audit(nn.DataParallel(vit)).errors == ()


@pytest.mark.parametrize("act", [zoo.freeze, zoo.unfreeze])
@pytest.mark.parametrize(("patterns", "got"), [(3, "3"), (["head", None], "None"), (nn.Linear, ".*Linear")])
def test_what_is_no_pattern_is_refused_in_one_line(vit, act, patterns, got) -> None:
    with pytest.raises(ZooError, match=rf"^{act.__name__} wants patterns, texts such as 'head' .*, got {got}"):
        act(vit, patterns)
    assert frozen(vit) == set()


@pytest.mark.parametrize("model", [nn.Linear, "vit", None])
def test_what_is_no_model_cannot_be_frozen(model) -> None:
    with pytest.raises(ZooError, match=r"^freeze wants a model, an nn\.Module, got "):
        zoo.freeze(model, "head")


def test_patterns_may_come_from_a_generator(vit) -> None:
    assert zoo.freeze(vit, (name for name in ["head.bias", "cls_token"])) == ("cls_token", "head.bias")
