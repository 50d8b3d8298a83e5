import json
import tracemalloc

import pytest

from serve.errors import MalformedError, TooLargeError
from serve.protocol.strict_json import JsonLimits, parse_strict_json

LIMITS = JsonLimits(max_depth=3, max_objects=4, max_arrays=5, max_strings=6)


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        "text",
        3,
        -0.5,
        None,
        True,
        {"a": [{"b": 1}]},
        [[[1]]],
        ["[[[[[[{{{{", "]]]]", '"[[[["', "\\[[[[", '\\"[[[[', "日本[[[["],
        {"a\\": "\\\\", 'b"': '"'},
    ],
)
def test_json_within_the_limits_is_parsed_as_it_stands(value: object) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=3)):
        assert parse_strict_json(text.encode(), LIMITS) == value


@pytest.mark.parametrize(
    "text",
    [
        "[[[[1]]]]",
        '{"a":{"b":{"c":{}}}}',
        '[{"a":[{}]}]',
        '["]]]]",[[[1]]]]',
        '["\\"]]]",[[[1]]]]',
        "[" * 10**6,
        "[[[[",
        '[[[["',
    ],
)
def test_what_is_too_deep_is_refused(text: str) -> None:
    with pytest.raises(MalformedError, match=r"nested too deeply: more than 3 levels"):
        parse_strict_json(text.encode(), LIMITS)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ([{}] * 5, "4 objects"),
        ([[]] * 5, "5 arrays"),
        (["a"] * 7, "6 strings"),
        ({str(i): 0 for i in range(7)}, "6 strings"),
        (["[[[["] * 7, "6 strings"),
    ],
)
def test_more_parts_than_allowed_are_refused(value: object, what: str) -> None:
    with pytest.raises(TooLargeError, match=f"more than {what}"):
        parse_strict_json(json.dumps(value).encode(), LIMITS)


def test_escaped_quotes_are_no_strings() -> None:
    value = ['"' * 1000, "\\" * 999, '\\"' * 1000]
    assert parse_strict_json(json.dumps(value).encode(), LIMITS) == value


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON .line 1, column 2"),
        (b'{"a": 1,}', "not JSON"),
        (b"{'a': 1}", "not JSON"),
        (b"[1] x", "not JSON"),
        (b'["\n"]', "not JSON"),
        (b"[01]", "not JSON"),
        (b"[NaN]", "NaN or Infinity"),
        (b"[-Infinity]", "NaN or Infinity"),
        (b'{"a": 1, "a": 2}', "same key twice"),
        (b'{"a": 1, "\\u0061": 2}', "same key twice"),
        (b'[{"a": 1, "a": 2}]', "same key twice"),
        (b"\xef\xbb\xbf[]", "byte order mark"),
        ("[]".encode("utf-16"), "not UTF-8"),
        (b'["\xff"]', "not UTF-8"),
        (b'["\xed\xa0\x80"]', "not UTF-8"),  # a surrogate, encoded as if it were a character
        (b'["\xc0\xaf"]', "not UTF-8"),
        (b"[" + b"1" * 5000 + b"]", "not JSON that can be read"),
    ],
)
def test_what_is_not_json_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(MalformedError, match=message):
        parse_strict_json(body, LIMITS)


def test_the_limits_leave_room_for_every_form_of_so_many_images() -> None:
    limits = JsonLimits.for_images(32, 64)
    split = {"columns": ["image"], "index": ["name"] * 64, "data": [["aGk="]] * 64}
    for value in (
        {"dataframe_split": split, "params": {"top_k": 1}},
        {"dataframe_records": [{"image": "aGk="}] * 64},
        {"inputs": [[[[0]] * 128] * 3] * 64},
    ):
        assert parse_strict_json(json.dumps(value).encode(), limits) == value


@pytest.mark.parametrize("part", [b'{"":0},', b"[],", b'"",', b'"\\"",'])
def test_very_many_parts_are_refused_before_any_is_made(part: bytes) -> None:
    body = b"[" + part * (10**6 // len(part)) + b"0]"
    tracemalloc.start()
    with pytest.raises(TooLargeError):
        parse_strict_json(body, JsonLimits.for_images(32, 16))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * len(body)
