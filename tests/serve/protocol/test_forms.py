import pytest

from serve.errors import MalformedError, TooLargeError
from serve.protocol.forms import read_files

FILE = 'Content-Disposition: form-data; name="image"; filename="日本.png"\r\nContent-Type: image/png'


def form(*parts: tuple[str, bytes], end: bytes = b"--x--\r\n") -> bytes:
    return b"".join(b"--x\r\n" + head.encode() + b"\r\n\r\n" + data + b"\r\n" for head, data in parts) + end


def test_files_are_read_in_order_byte_for_byte() -> None:
    contents = [b"", b"abc", bytes(range(256)) * 300, b"\r\n--y\r\n--\r\n", b"--x", b"\r\n"]
    assert read_files(b"x", form(*((FILE, data) for data in contents)), 6) == contents


def test_a_form_without_parts_has_no_files() -> None:
    assert read_files(b"x", b"--x--\r\n", 6) == []


@pytest.mark.parametrize(
    ("boundary", "body", "message"),
    [
        (b"", form((FILE, b"a")), "names no boundary"),
        (b"y", form((FILE, b"a")), "not multipart/form-data"),
        (b"x" * 300, form((FILE, b"a")), "not multipart/form-data"),
        (b"x", b"", "ends before its last boundary"),
        (b"x", form((FILE, b"a"), end=b""), "ends before its last boundary"),
        (b"x", form((FILE, b"a"))[:-20], "ends before its last boundary"),
        (b"x", form(("Content-Disposition: attachment; filename=a", b"a")), "a part without Content-Disposition"),
        (b"x", form(("Content-Disposition: form-data; filename=a", b"a")), "a part without Content-Disposition"),
        (b"x", form(("A: b", b"a")), "a part without Content-Disposition"),
        (b"x", form((FILE, b"a"), ("A: b", b"a")), "a part without Content-Disposition"),
        (b"x", form(('Content-Disposition: form-data; name="top_k"', b"3")), "a field that is no file"),
        (b"x", form((FILE + "\r\nA: b" * 50, b"a")), "not multipart/form-data"),
        (b"x", form((FILE + "\r\nA: " + "b" * 10_000, b"a")), "not multipart/form-data"),
    ],
)
def test_what_is_no_form_of_files_is_refused(boundary: bytes, body: bytes, message: str) -> None:
    with pytest.raises(MalformedError, match=message):
        read_files(boundary, body, 6)


def test_too_many_files_are_refused_without_reading_them_all() -> None:
    with pytest.raises(TooLargeError, match="more than 2 files"):
        read_files(b"x", form(*[(FILE, b"a")] * 3, end=b"nonsense"), 2)
