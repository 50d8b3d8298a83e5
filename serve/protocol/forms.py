"""The files of a multipart form, out of a body that is in memory."""

from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from serve.errors import MalformedError, TooLargeError

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks


class _Parts:
    """Collects the parts while the parser calls back."""

    def __init__(self, max_files: int) -> None:
        self.files: list[bytes] = []
        self.is_whole = False
        self._max_files = max_files
        self._name, self._disposition = bytearray(), bytearray()
        self._value, self._data = bytearray(), bytearray()

    def callbacks(self) -> "MultipartCallbacks":
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._name.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._check_part,
            "on_part_data": lambda data, start, end: self._data.extend(data[start:end]),
            "on_part_end": lambda: self.files.append(bytes(self._data)),
            "on_end": self._end,
        }

    def _begin(self) -> None:
        self._disposition, self._data = bytearray(), bytearray()

    def _end_header(self) -> None:
        if self._name.lower() == b"content-disposition":
            self._disposition = self._value
        self._name, self._value = bytearray(), bytearray()

    def _check_part(self) -> None:
        kind, options = parse_options_header(bytes(self._disposition))
        if kind != b"form-data" or b"name" not in options:
            raise MalformedError("the form has a part without Content-Disposition: form-data and a name")
        if b"filename" not in options:
            raise MalformedError("the form has a field that is no file; give every image a file name")
        if len(self.files) == self._max_files:
            raise TooLargeError(f"the form has more than {self._max_files} files")

    def _end(self) -> None:
        self.is_whole = True


def read_files(boundary: bytes, body: bytes, max_files: int) -> list[bytes]:
    """Read the files of a multipart form, in order.

    Args:
        boundary: What separates the parts, out of the content type.
        body: The whole form.
        max_files: Most files.

    Raises:
        MalformedError: If it is no such form, or has a field that is no file.
        TooLargeError: If it has more than `max_files`.
    """
    parts = _Parts(max_files)
    if not boundary:
        raise MalformedError("the body is not multipart/form-data: the content type names no boundary")
    try:
        parser = MultipartParser(boundary, parts.callbacks())
        parser.write(body)
        parser.finalize()
    except (FormParserError, ValueError) as error:
        if isinstance(error, MalformedError | TooLargeError):
            raise
        raise MalformedError("the body is not multipart/form-data") from error
    if not parts.is_whole:
        raise MalformedError("the form ends before its last boundary")
    return parts.files
