import pytest

from zoo.errors import UnknownNameError, ZooError
from zoo.patterns import find_matches, select

DEPTH = 12
BLOCKS = [f"blocks.{i}.{part}" for i in range(DEPTH) for part in ("attn.qkv.weight", "attn.qkv.bias", "norm.weight")]
STAGES = [f"stages.{s}.blocks.{i}.weight" for s, depth in ((0, 2), (1, 6)) for i in range(depth)]
NAMES = ["cls_token", "patch_embed.proj.weight", *BLOCKS, *STAGES, "head.weight", "head.bias"]
TENSORS = {name: object() for name in NAMES}


def blocks(*indices: int) -> set[str]:
    return {name for name in BLOCKS if int(name.split(".")[1]) in indices}


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("head.bias", {"head.bias"}),
        ("head", {"head.weight", "head.bias"}),
        ("blocks.1", blocks(1)),
        ("blocks.*.norm", {f"blocks.{i}.norm.weight" for i in range(DEPTH)}),
        ("*.qkv.bias", {f"blocks.{i}.attn.qkv.bias" for i in range(DEPTH)}),
        ("blocks.0-5", blocks(*range(6))),
        ("blocks.0-0", blocks(0)),
        ("blocks.0-11", set(BLOCKS)),
        ("blocks.11-11", blocks(11)),
        ("blocks.9-", blocks(9, 10, 11)),
        ("blocks.11-", blocks(11)),
        ("blocks.1-2.norm", {"blocks.1.norm.weight", "blocks.2.norm.weight"}),
        ("blocks.1-2.*.bias", {"blocks.1.attn.qkv.bias", "blocks.2.attn.qkv.bias"}),
        ("stages.1.blocks.0-3", {f"stages.1.blocks.{i}.weight" for i in range(4)}),
        ("stages.0-1.blocks.1-1", {"stages.0.blocks.1.weight", "stages.1.blocks.1.weight"}),
        ("stages.*.blocks.1-", {name for name in STAGES if ".blocks.0." not in name}),
        ("*", set(NAMES)),
        ("all", set(NAMES)),
        ("all but head", set(NAMES) - {"head.weight", "head.bias"}),
        ("all but *.bias", {name for name in NAMES if not name.endswith(".bias")}),
        ("all but head, cls_token", set(NAMES) - {"head.weight", "head.bias", "cls_token"}),
        ("all but head and blocks.10-", set(NAMES) - {"head.weight", "head.bias"} - blocks(10, 11)),
        ("all  but head.bias, cls_token, and stages", set(NAMES) - {"head.bias", "cls_token", *STAGES}),
        (["blocks.3", "blocks.3-4", "head"], blocks(3, 4) | {"head.weight", "head.bias"}),
        ([], set()),
    ],
)
def test_pattern_names_what_it_says_in_the_models_order(pattern, names) -> None:
    assert select(TENSORS, pattern) == tuple(name for name in NAMES if name in names)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("blocks.12", r"unknown pattern 'blocks\.12', did you mean .*; blocks holds 12, 0 to 11"),
        ("blocks.12.attn.*", r"blocks holds 12, 0 to 11"),
        ("blocks.0-12", r"unknown pattern 'blocks\.0-12', did you mean 'blocks\.0-11'\?; blocks holds 12, 0 to 11"),
        ("blocks.12-", r"did you mean 'blocks\.11-11'\?; blocks holds 12, 0 to 11"),
        ("blocks.12-14", r"blocks holds 12, 0 to 11"),
        ("stages.0-1.blocks.0-5", r"stages\.0\.blocks holds 2, 0 to 1"),
        ("stages.*.blocks.4-", r"stages\.0\.blocks holds 2, 0 to 1"),
        ("block.0-5", r"unknown pattern 'block\.0-5', did you mean 'blocks\.\d'"),
        ("blocks.0-5.atn", r"unknown pattern 'blocks\.0-5\.atn', did you mean .*'blocks\.\d\.attn'"),
        ("head.0-5", r"unknown pattern 'head\.0-5'"),
        ("blocks.-3", r"unknown pattern 'blocks\.-3', .*a range as in blocks\.0-5"),
        ("all but heads", r"unknown pattern 'heads', did you mean 'head'"),
        ("all but blocks.12-", r"blocks holds 12, 0 to 11"),
        ("all but", r"unknown pattern 'all but'.*'all but head'"),
        ("head, cls_token", r"unknown pattern 'head, cls_token'.*several patterns are a list: \[a, b\]"),
        ("", r"unknown pattern ''"),
        (["head", "cls_tokn"], r"unknown pattern 'cls_tokn', did you mean 'cls_token'"),
    ],
)
def test_pattern_that_names_nothing_or_counts_too_far_says_what_there_is(pattern, said) -> None:
    with pytest.raises(UnknownNameError, match=said) as caught:
        select(TENSORS, pattern)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("blocks.5-0", r"'blocks\.5-0': the range 5-0 is empty; the lower index comes first: 0-5"),
        ("all but *", r"'all but \*' leaves out everything"),
        (["all but head", "cls_token"], r"'all but head' names 'cls_token' too.*'all but head and cls_token'"),
        (["cls_token", "all but head"], r"'all but head' names 'cls_token' too"),
        (["all but head", "all but cls_token"], r"'all but head' names 'all but cls_token' too"),
    ],
)
def test_contradiction_is_said_plainly(pattern, said) -> None:
    with pytest.raises(ZooError, match=said):
        select(TENSORS, pattern)


def test_what_has_two_names_is_named_and_left_out_by_either() -> None:
    shared = object()
    tensors = {"embed.weight": shared, "body.weight": object(), "head.weight": shared}
    assert select(tensors, "head") == ("embed.weight", "head.weight")
    assert select(tensors, "all but head") == ("body.weight",)


def test_range_counts_at_the_top_of_a_sequence_and_skips_what_holds_nothing() -> None:
    tensors = {f"{i}.weight": object() for i in (0, 2, 5)}  # as an nn.Sequential with activations between
    assert select(tensors, "0-2") == ("0.weight", "2.weight")
    assert select(tensors, "2-") == ("2.weight", "5.weight")
    with pytest.raises(UnknownNameError, match="the model holds 3, 0 to 5"):
        select(tensors, "0-6")
    with pytest.raises(UnknownNameError, match="unknown pattern '3-4'"):
        select(tensors, "3-4")


def test_module_that_is_called_all_is_itself() -> None:
    assert select({"all.weight": object(), "head.weight": object()}, "all") == ("all.weight",)


def test_matches_are_full_names_alone() -> None:
    assert find_matches("blocks.0-1.norm.weight", NAMES) == ("blocks.0.norm.weight", "blocks.1.norm.weight")
    with pytest.raises(UnknownNameError, match="unknown parameter 'head'"):
        find_matches("head", NAMES)
