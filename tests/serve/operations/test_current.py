import re

import pytest

from serve.operations.current import CURRENT, CurrentRequest, note_model, parse_traceparent, read_request

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize("text", ["a", "abc-DEF_1.2", "x" * 64])
def test_a_sane_request_id_is_kept(text: str) -> None:
    assert read_request([(b"host", b"x"), (b"x-request-id", text.encode())]).request_id == text


@pytest.mark.parametrize(
    "value", [b"", b"x" * 65, b"a b", b"a\nb", b"a\r\nx: y", b'"', b"\xe9", b"<script>", b"a;b", b"a\x00"]
)
def test_any_other_request_id_is_replaced(value: bytes) -> None:
    ids = {read_request(headers).request_id for headers in ([(b"x-request-id", value)], [], [])}
    assert len(ids) == 3
    assert all(re.fullmatch("[0-9a-f]{32}", made) for made in ids)


def test_the_trace_of_a_caller_is_taken() -> None:
    current = read_request([(b"traceparent", f"00-{TRACE}-{SPAN}-01".encode())])
    assert (current.trace_id, current.span_id) == (TRACE, SPAN)
    assert parse_traceparent(f" cc-{TRACE}-{SPAN}-01-what-comes-later ") == (TRACE, SPAN)


@pytest.mark.parametrize(
    "text",
    [
        "",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\n",
        f"00-{TRACE[:-1]}\n-{SPAN}-01",
        f"cc-{TRACE}-{SPAN}-01.more",
    ],
)
def test_what_is_no_trace_is_as_if_it_were_not_there(text: str) -> None:
    expected = (TRACE, SPAN) if text.endswith("-01\n") else ("", "")  # white space around is not the sender's
    assert parse_traceparent(text) == expected


def test_the_model_is_noted_for_the_request_that_is_answered() -> None:
    note_model("digits", "3", 2)  # outside of any request: nothing to note it in
    current = CurrentRequest("a")
    token = CURRENT.set(current)
    note_model("digits", "3", 2)
    CURRENT.reset(token)
    assert (current.model, current.version, current.images) == ("digits", "3", 2)
