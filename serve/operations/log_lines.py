"""The form of a log line: text or JSON, one record a line, whatever a request put into it."""

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Literal, TextIO

from serve.operations.current import CURRENT

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_BLANK = re.compile(r'[\s"=]')
_NOISY = ("urllib3", "asyncio", "httpx", "multipart", "python_multipart")


def configure_logging(level: str, form: Literal["text", "json"], stream: TextIO | None = None) -> None:
    """Send every record to `stream`, standard error by default; other libraries speak from WARNING on.

    Args:
        level: Least severity of ours: "debug", "info", "warning" or "error".
        form: One JSON object on a line, or text.
        stream: Where to.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _NOISY:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # it warns at every retry; the last failure says it all


class JsonLines(logging.Formatter):
    """One JSON object for a record; JSON's own escapes keep it on its line."""

    def format(self, record: logging.LogRecord) -> str:
        """Write time, level, logger, message, the request's ids, the record's fields, and the traceback."""
        line = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_ids(),
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)  # ASCII only: a lone surrogate or a line separator is escaped too


class TextLines(logging.Formatter):
    """A line for a record; control characters are escaped, and the lines of a traceback are indented."""

    def format(self, record: logging.LogRecord) -> str:
        """Write the same as `JsonLines`, as key=value."""
        said = getattr(record, "said", ())  # what the message says already
        fields = (_fields(record) | _ids()).items()
        pairs = " ".join(f"{name}={_quote(value)}" for name, value in fields if name not in said)
        line = f"{_time(record)} {record.levelname} {record.name}: {_escape(record.getMessage())}"
        line = f"{line} {pairs}" if pairs else line
        if record.exc_info:
            trace = self.formatException(record.exc_info).split("\n")
            line = "\n".join([line, *(f"    {_escape(part)}" for part in trace)])
        return line


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields: dict[str, object] = getattr(record, "fields", {})
    return fields


def _ids() -> dict[str, object]:
    current = CURRENT.get()
    if current is None:
        return {}
    if not current.trace_id:
        return {"request_id": current.request_id}
    return {"request_id": current.request_id, "trace_id": current.trace_id, "span_id": current.span_id}


def _escape(text: str) -> str:
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def _quote(value: object) -> str:
    text = _escape(str(value))
    return json.dumps(text, ensure_ascii=False) if not text or _BLANK.search(text) else text
