import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from serve.operations.current import CURRENT, CurrentRequest
from serve.operations.log_lines import configure_logging

EVIL = "a\nERROR serve: forged\r\x1b[31m\u2028\x85\ud800\x00"


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield io.StringIO()
    root.handlers[:], root.level = before


@pytest.fixture
def current() -> Iterator[CurrentRequest]:
    current = CurrentRequest("the-id", "ab" * 16, "cd" * 8)
    token = CURRENT.set(current)
    yield current
    CURRENT.reset(token)


def fail(message: str) -> None:
    raise ValueError(message)


def log(stream: io.StringIO, form: Any, **fields: object) -> str:
    configure_logging("info", form, stream)
    logger = logging.getLogger("serve.x")
    logger.debug("hidden")
    logger.info("message %s", EVIL, extra={"fields": fields})
    return stream.getvalue()


def test_a_json_line_is_one_object_with_all_there_is(stream: io.StringIO, current: CurrentRequest) -> None:
    text = log(stream, "json", evil=EVIL, ms=1.5)
    assert text.count("\n") == 1
    assert text.isascii()
    line = json.loads(text)
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "INFO",
        "logger": "serve.x",
        "message": f"message {EVIL}",
        "request_id": current.request_id,
        "trace_id": current.trace_id,
        "span_id": current.span_id,
        "evil": EVIL,
        "ms": 1.5,
    }


@pytest.mark.usefixtures("current")
def test_a_text_line_holds_no_control_characters(stream: io.StringIO) -> None:
    text = log(stream, "text", evil=EVIL, empty="", spaced='a b="c"', ms=1.5)
    assert text.count("\n") == 1
    assert len(text.splitlines()) == 1
    assert text[:-1].isprintable()
    assert r" INFO serve.x: message a\nERROR serve: forged\r\x1b[31m\u2028\x85\ud800\x00 evil=" in text
    assert f' empty="" spaced="a b=\\"c\\"" ms=1.5 request_id=the-id trace_id={"ab" * 16} span_id={"cd" * 8}' in text


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_traceback_cannot_pass_for_a_line(stream: io.StringIO, form: Any, current: CurrentRequest) -> None:
    configure_logging("info", form, stream)
    try:
        fail(EVIL)
    except ValueError:
        logging.getLogger("serve").exception("failed")
    lines = stream.getvalue().split("\n")[:-1]
    assert current.request_id in lines[0]
    assert "ValueError: a" in stream.getvalue()
    if form == "json":
        assert len(lines) == 1
    else:
        assert all(line.startswith("    ") and line.isprintable() for line in lines[1:])


def test_outside_of_a_request_there_are_no_ids(stream: io.StringIO) -> None:
    assert "request_id" not in log(stream, "json")


def test_other_libraries_speak_from_warning_on(stream: io.StringIO) -> None:
    configure_logging("debug", "text", stream)
    logging.getLogger("asyncio").info("selector")
    logging.getLogger("urllib3.connectionpool").warning("retrying")
    logging.getLogger("serve").debug("ours")
    assert [line.split(": ")[1] for line in stream.getvalue().splitlines()] == ["ours"]
