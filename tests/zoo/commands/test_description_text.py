"""What a person reads: the odd block stands out, alike blocks are told once."""

from typing import Any

from torch import nn

import zoo
from zoo.commands.columns import join_names

HEAD = "   ATTENTION       DIM  HEADS   STD q   STD k   STD v  STD out  LOGIT STD  ENTROPY"
TINY: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "num_heads": 2, "num_classes": 3}


def told(init: str | None, depth: int = 24, plant: Any = lambda _: None, attention: str = "parameter") -> list[str]:
    model = zoo.create_model("vit_tiny_patch16_224", attention, init=init, seed=0, depth=depth, **TINY)
    plant(model)
    return str(zoo.describe(model, init)).splitlines()


def marked(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("!")]


def test_24_alike_blocks_are_a_line_each_and_what_they_store_is_told_once() -> None:
    lines = told("torch")
    assert lines[0].strip() == HEAD.strip()
    assert lines[1].split() == ["by", "the", "scheme", *["0.0722"] * 4, "0.336", "max", "4.17"]
    assert lines[2].split()[:3] == ["blocks.0.attn", "64", "2"]
    assert lines[26:28] == ["", "blocks.0-23.attn: attention.Attention stores"]
    assert lines[28].split() == ["qkv.to_q", "64", "x", "64", "q", "trainable"]
    assert len(lines) == 36
    assert marked(lines) == []


def test_the_odd_block_is_marked_in_the_table_and_named_below() -> None:
    lines = told("torch", plant=lambda model: model.get_parameter("blocks.7.attn.qkv.to_k").data.normal_())
    row, *notes = marked(lines)
    assert row.split()[:2] == ["!", "blocks.7.attn"]
    assert [note.partition(": ")[0] for note in notes] == ["! blocks.7.attn", "! blocks.7.attn"]
    assert notes[0].startswith("! blocks.7.attn: std of qkv.to_k ")
    assert notes[0].endswith(" where the scheme gives 0.0722")
    assert lines[-2:] == notes


def test_doubts_are_told_before_remarks() -> None:
    def plant(model: nn.Module) -> None:
        zoo.freeze(model, "blocks.0.attn.qkv.to_q")
        model.get_parameter("blocks.3.attn.qkv.to_k").data.mul_(2)

    first, last = told("torch", depth=4, plant=plant)[-2:]
    assert first.startswith("! blocks.3.attn: ")
    assert last == "  blocks.0.attn: qkv.to_q is frozen"


def test_a_doubt_of_all_blocks_is_told_once_with_its_range() -> None:
    lines = told("normal", depth=4)
    *rows, note = marked(lines)
    assert len(rows) == 4
    assert note.startswith("! blocks.0-3.attn: attends to one token: logit std 6")
    assert note.endswith("where nn.Linear's draw gives 0.333")


def test_blocks_that_store_otherwise_are_told_apart() -> None:
    lines = told(None, depth=6, plant=lambda model: zoo.freeze(model, "blocks.2-3.attn.qkv.to_q"))
    heads = [line for line in lines if line.endswith("stores")]
    assert heads == [
        "blocks.0-1.attn, blocks.4-5.attn: attention.Attention stores",
        "blocks.2-3.attn: attention.Attention stores",
    ]
    assert lines[-1] == "  blocks.2-3.attn: qkv.to_q is frozen"
    assert any(line.split() == ["qkv.to_q", "64", "x", "64", "q", "frozen"] for line in lines)


def test_tied_blocks_are_told_apart_from_alike_ones() -> None:
    lines = told(None, depth=4, plant=lambda model: zoo.tie(model, "blocks.0-1.attn.qkv.to_q"))
    assert [line for line in lines if line.endswith("stores")] == [
        "blocks.0-1.attn: attention.Attention stores",
        "blocks.2-3.attn: attention.Attention stores",
    ]
    assert any(line.split()[-2:] == ["trainable,", "tied"] for line in lines)
    assert lines[-2:] == [
        "  blocks.0.attn: qkv.to_q is one tensor with blocks.1.attn.qkv.to_q",
        "  blocks.1.attn: qkv.to_q is one tensor with blocks.0.attn.qkv.to_q",
    ]


def test_what_no_part_is_and_what_cannot_be_measured_is_a_dash() -> None:
    model = zoo.create_model("xcit_nano_12_p8_224", "linear", seed=0)  # attends over channels
    lines = str(zoo.describe(model)).splitlines()
    row = next(line for line in lines if line.split()[0] == "blocks.0.attn")
    assert row.split()[-2:] == ["-", "-"]
    assert any(line.split()[:2] == ["temperature", "4"] and "-" in line for line in lines)


def test_an_attention_that_is_the_model_itself_has_a_name() -> None:
    lines = str(zoo.describe(zoo.Attention(64, 2, 32), "torch")).splitlines()
    assert lines[2].split()[:4] == ["(the", "model)", "64", "2"]
    assert "(the model): attention.Attention stores" in lines


def test_every_line_is_ascii_and_ends_without_spaces() -> None:
    lines = told("normal", depth=3, plant=lambda model: zoo.freeze(model, "all"))
    assert "\n".join(lines).isascii()
    assert [line for line in lines if line != line.rstrip()] == []


def test_a_range_is_a_pattern_that_freeze_takes() -> None:
    model = zoo.create_model("vit_tiny_patch16_224", "parameter", seed=0, depth=4, **TINY)
    name = join_names(f"blocks.{block}.attn" for block in range(1, 3))
    zoo.freeze(model, name)
    assert {n.split(".")[1] for n, p in model.named_parameters() if not p.requires_grad} == {"1", "2"}


def test_a_model_without_attention_is_an_empty_table() -> None:
    assert str(zoo.describe(nn.Sequential(nn.Linear(2, 2)))).split() == HEAD.split()
