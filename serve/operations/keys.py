"""API keys out of a file: who may ask. A key is never logged, its name is."""

import hmac
import logging
import re
import time
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path

from serve.errors import KeyFileError, KeyRefusedError

logger = logging.getLogger(__name__)

_LINE = re.compile(r"(?:(?P<name>[A-Za-z0-9._\-]{1,64}):)?(?P<key>[!-9;-~]{16,512})", re.ASCII)
_LOOK_EVERY_S = 1.0


class KeyRing:
    """The keys of one file, read again when it changes.

    Args:
        path: One key a line, `name:key` or the key alone; blank lines and lines that begin with # are skipped. A key
            has 16 to 512 visible ASCII characters, no colon among them.
        clock: Seconds, never going back.

    Raises:
        KeyFileError: If the file cannot be read, has no key or a line that is none.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._stamp = _stamp(path)
        self._keys = read_keys(path)
        self._looked = clock()

    def check(self, key: str | None) -> str:
        """Return the name of `key`. All keys are compared, each in constant time, so time tells nothing.

        Raises:
            KeyRefusedError: If there is none, or it is not known.
        """
        self._refresh()
        if key is None:
            raise KeyRefusedError("an API key is needed: Authorization: Bearer KEY, or x-api-key: KEY")
        digest, found = sha256(key.encode("utf-8", "surrogatepass")).digest(), ""
        for name, known in self._keys.items():
            if hmac.compare_digest(digest, known):
                found = name
        if not found:
            raise KeyRefusedError("the API key is not known here")
        return found

    def _refresh(self) -> None:
        """Look at the file at most once a second; one that is broken now changes nothing."""
        now = self._clock()
        if now - self._looked < _LOOK_EVERY_S:
            return
        self._looked = now
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = read_keys(self._path)
        except KeyFileError as error:
            logger.warning("the API keys stay as they were: %s", error)
        else:
            logger.info("%d API keys are read again", len(self._keys))


def read_keys(path: Path) -> dict[str, bytes]:
    """Read the file as `KeyRing` says; return the SHA-256 of each key by name.

    Raises:
        KeyFileError: Naming the line, never what stands in it.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise KeyFileError(f"API keys {path}: cannot be read: {reason}") from error
    keys: dict[str, bytes] = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        found = _LINE.fullmatch(line)
        if not found:
            raise KeyFileError(
                f"API keys {path}, line {number}: wanted is KEY or NAME:KEY, a key being 16 to 512 visible ASCII "
                "characters without a colon"
            )
        name, digest = found["name"] or f"line-{number}", sha256(found["key"].encode()).digest()
        if name in keys or digest in keys.values():
            raise KeyFileError(f"API keys {path}, line {number}: the name or the key stands above already")
        keys[name] = digest
    if not keys:
        raise KeyFileError(f"API keys {path}: the file has no key, so nobody could ask; write one on a line")
    return keys


def find_key(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Take the key out of `Authorization: Bearer KEY` or else `x-api-key: KEY`; None without one."""
    other = None
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.decode("latin-1").partition(" ")
            if scheme.lower() == "bearer":
                return key.strip()
        elif name == b"x-api-key":
            other = value.decode("latin-1").strip()
    return other


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """What changes when the file does; a mounted secret changes by its link, so that is followed."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
