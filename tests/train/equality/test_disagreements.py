from train.equality.disagreements import describe_disagreement, describe_shared


def test_machines_are_named_where_there_are_several() -> None:
    message = describe_disagreement(
        [{"version: timm": v} for v in ("1.0.30", "1.0.30", "1.0.31", "1.0.31", "1.0.30")],
        ["ash", "ash", "elm", "elm", "oak"],
        what="start",
    )
    assert message.splitlines()[:2] == [
        "start: ranks 2, 3 (elm) of 5 disagree with ranks 0, 1, 4 (ash, oak) on version: timm",
        '  version: timm: "1.0.30" on ranks 0, 1, 4 (ash, oak), "1.0.31" on ranks 2, 3 (elm)',
    ]


def test_what_may_differ_is_told_last() -> None:
    ranks = [{"device: name": "H100", "config: seed": 0}, {"device: name": "H200", "config: seed": 1}]
    lines = describe_disagreement(ranks, ["ash", "ash"], what="start").splitlines()
    assert lines[0] == "start: rank 1 of 2 disagrees with rank 0 on config: seed, device: name"
    assert [line.split(":")[0].strip() for line in lines[1:3]] == ["config", "device"]


def test_an_unknown_stream_and_one_that_repeats_within_a_rank() -> None:
    assert describe_shared("mixup", [[1, 1], [2], [3, 1]]) == (
        "mixup: equal on ranks 0 and 2 (1 of 2, such as 1); likely cause: it must be each rank's own"
    )
    assert describe_shared("mixup", [[1, 1], [2, 2]]) == ""
