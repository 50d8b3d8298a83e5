import hmac
import logging
import os
from pathlib import Path

import pytest

from serve.errors import KeyFileError, KeyRefusedError
from serve.operations import keys
from serve.operations.keys import KeyRing, find_key, read_keys

FIRST, SECOND = "first-key-0123456789", "second/key+0123456789=="


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"# who may ask\n\nalice:{FIRST}\r\n  {SECOND}  \n")
    return path


@pytest.fixture
def now() -> list[float]:
    """The clock of the ring, in its only element."""
    return [100.0]


def test_a_key_is_known_by_its_name_or_its_line(file: Path) -> None:
    ring = KeyRing(file)
    assert ring.check(FIRST) == "alice"
    assert ring.check(SECOND) == "line-4"


@pytest.mark.parametrize(
    "key", ["", "alice", f"alice:{FIRST}", FIRST[:-1], FIRST + "0", FIRST.upper(), "é" * 20, "\ud800"]
)
def test_another_key_is_refused_without_an_echo(file: Path, key: str) -> None:
    with pytest.raises(KeyRefusedError, match=r"^the API key is not known here$"):
        KeyRing(file).check(key)


def test_no_key_is_told_how_to_give_one(file: Path) -> None:
    with pytest.raises(KeyRefusedError, match="Authorization: Bearer KEY, or x-api-key: KEY"):
        KeyRing(file).check(None)


def test_all_keys_are_compared_in_constant_time_and_only_their_digests(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = KeyRing(file)
    compared = []
    compare = hmac.compare_digest

    def count(given: bytes, known: bytes) -> bool:
        compared.append((given, known))
        return compare(given, known)

    monkeypatch.setattr(keys.hmac, "compare_digest", count)
    ring.check(FIRST)  # the first of the two
    assert len(compared) == 2
    assert all(len(given) == len(known) == 32 for given, known in compared)
    assert FIRST not in repr(vars(ring))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no key, so nobody could ask"),
        ("# nothing\n\n", "has no key"),
        ("too-short", "line 1: wanted is KEY or NAME:KEY"),
        (f"{FIRST}\na b {SECOND}", "line 2: wanted is"),
        (f"a b:{FIRST}", "line 1: wanted is"),
        (f"alice:{FIRST}:more", "line 1: wanted is"),
        (f"é{FIRST}", "line 1: wanted is"),
        (f"a:{FIRST}\na:{SECOND}", "line 2: the name or the key stands above already"),
        (f"a:{FIRST}\nb:{FIRST}", "line 2: the name or the key stands above already"),
    ],
)
def test_a_broken_file_is_told_by_its_line_never_by_its_content(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(KeyFileError, match=message) as raised:
        KeyRing(tmp_path / "keys")
    assert str(raised.value).startswith(f"API keys {tmp_path / 'keys'}")
    assert FIRST not in str(raised.value)
    assert SECOND not in str(raised.value)


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="cannot be read: No such file or directory"):
        KeyRing(tmp_path / "keys")
    with pytest.raises(KeyFileError, match="cannot be read: Is a directory"):
        read_keys(tmp_path)
    (tmp_path / "keys").write_bytes(b"\xff" * 20)
    with pytest.raises(KeyFileError, match="cannot be read: not UTF-8"):
        read_keys(tmp_path / "keys")


def test_a_changed_file_is_read_again(file: Path, now: list[float], caplog: pytest.LogCaptureFixture) -> None:
    ring = KeyRing(file, clock=lambda: now[0])
    file.write_text(f"bob:{SECOND}\n")
    assert ring.check(FIRST) == "alice"  # it is looked at once a second
    now[0] += 1
    with caplog.at_level(logging.INFO):
        assert ring.check(SECOND) == "bob"
    assert caplog.messages == ["1 API keys are read again"]
    with pytest.raises(KeyRefusedError):
        ring.check(FIRST)


def test_a_mounted_secret_changes_by_its_link(tmp_path: Path, file: Path, now: list[float]) -> None:
    link = tmp_path / "link"
    link.symlink_to(file)
    ring = KeyRing(link, clock=lambda: now[0])
    other = tmp_path / "other"
    other.write_bytes(file.read_bytes().replace(FIRST.encode(), b"other-key-0123456789"))  # as long
    os.utime(other, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    link.unlink()
    link.symlink_to(other)
    now[0] += 1
    assert ring.check("other-key-0123456789") == "alice"


@pytest.mark.parametrize("how", ["broken", "empty", "gone"])
def test_a_file_that_breaks_later_changes_nothing_and_is_told_once(
    file: Path, now: list[float], caplog: pytest.LogCaptureFixture, how: str
) -> None:
    ring = KeyRing(file, clock=lambda: now[0])
    if how == "gone":
        file.unlink()
    else:
        file.write_text("short\n" if how == "broken" else "")
    for _ in range(3):
        now[0] += 1
        assert ring.check(FIRST) == "alice"
    (message,) = caplog.messages
    assert message.startswith(f"the API keys stay as they were: API keys {file}")
    file.write_text(f"bob:{FIRST}\n")
    now[0] += 1
    assert ring.check(FIRST) == "bob"


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ([], None),
        ([(b"authorization", b"Bearer abc")], "abc"),
        ([(b"authorization", b"bearer  abc ")], "abc"),
        ([(b"authorization", b"Basic abc")], None),
        ([(b"authorization", b"Bearer")], ""),
        ([(b"x-api-key", b" abc ")], "abc"),
        ([(b"authorization", b"Basic abc"), (b"x-api-key", b"def")], "def"),
        ([(b"x-api-key", b"def"), (b"authorization", b"Bearer abc")], "abc"),
    ],
)
def test_a_key_is_found_in_either_header(headers: list[tuple[bytes, bytes]], key: str | None) -> None:
    assert find_key(headers) == key
