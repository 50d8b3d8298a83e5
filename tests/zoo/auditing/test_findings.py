import pytest
import timm
import torch

import zoo
from zoo.auditing.findings import Finding, tell_findings
from zoo.errors import AuditError


def missing(*names: str, message: str = "is missing") -> list[Finding]:
    return [Finding("optimizer", "error", name, message) for name in names]


def test_line_begins_with_severity_check_and_name() -> None:
    assert str(Finding("tie", "note", "head", "is one")) == "note: tie: head: is one"
    assert str(Finding("probe", "error", "", "no graph")) == "error: probe: no graph"


def test_few_of_one_kind_have_a_line_each() -> None:
    assert list(tell_findings(missing("a", "b", "c", "d"))) == [
        f"error: optimizer: {name}: is missing" for name in "abcd"
    ]


def test_more_are_one_line_that_names_them_all_by_ranges_of_blocks() -> None:
    names = [
        "cls",
        *(f"blocks.{i}.{part}" for i in (2, 5, 1, 0) for part in ("w", "b")),
        "0.w",
        "head1",
        "head2",
        "1d.w",
        "2d.w",
        "t.1",
        "t.2",
    ]
    assert list(tell_findings(missing(*names))) == [
        "error: optimizer: cls: is missing [16 alike: cls, blocks.0-2.w, blocks.5.w, blocks.0-2.b, blocks.5.b, 0.w, "
        "head1, head2, 1d.w, 2d.w, t.1-2]"
    ]


def test_places_in_an_optimizer_are_joined_too() -> None:
    found = missing(*(f"group 1, tensor {place}" for place in (0, 1, 2, 3, 7)), message="of shape (1, 2)")
    (line,) = tell_findings(found)
    assert line == (
        "error: optimizer: group 1, tensor 0: of shape (1, 2) [5 alike: group 1, tensor 0-3, group 1, tensor 7]"
    )


def test_long_list_of_names_is_cut() -> None:
    (line,) = tell_findings(missing(*(f"part_{letter}" for letter in "abcdefghijklmnop")))
    assert line.startswith("error: optimizer: part_a: is missing [16 alike: part_a, part_b, ")
    assert line.endswith(", part_m, part_n, 2 others]")
    (line,) = tell_findings(missing(*(f"part_{letter}" for letter in "abcdefghijklmn")))
    assert line.endswith(", part_m, part_n]")


@pytest.mark.parametrize("number", ["3", "0.25", "-1e-05", "2.5e+07", "(2,)", "(1, 3, 8)"])
def test_findings_that_differ_in_numbers_are_of_one_kind_and_in_words_are_not(number) -> None:
    found = [*missing("a", message="has std 1"), *missing(*"bcde", message=f"has std {number}")]
    assert list(tell_findings(found)) == ["error: optimizer: a: has std 1 [5 alike: a, b, c, d, e]"]
    assert len(list(tell_findings([*found, *missing("f", message="has no std")]))) == 2


def test_other_checks_and_severities_are_other_kinds_in_their_order() -> None:
    warning = Finding("optimizer", "warning", "x", "is missing")
    probe = Finding("probe", "error", "y", "is missing")
    assert list(tell_findings([probe, *missing(*"abcde"), warning])) == [
        "error: probe: y: is missing",
        "error: optimizer: a: is missing [5 alike: a, b, c, d, e]",
        "warning: optimizer: x: is missing",
    ]


def test_fault_of_every_block_reads_in_a_few_lines_and_is_kept_tensor_by_tensor() -> None:
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=24, num_heads=2, num_classes=3
    )
    report = zoo.audit(model, torch.optim.SGD(model.head.parameters(), lr=0.1))
    assert len(report.errors) == 4 + 24 * 12 + 2
    _, line = str(report).splitlines()
    assert line.startswith("  error: optimizer: cls_token: is trainable and in no optimizer group")
    assert (
        "[294 alike: cls_token, pos_embed, patch_embed.proj.weight, patch_embed.proj.bias, blocks.0-23.norm1." in line
    )
    with pytest.raises(AuditError, match=r"296 parameters.*294 errors\n  error: optimizer: cls_token: [^\n]*others]$"):
        report.raise_for_findings()
