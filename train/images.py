"""Labelled images, in files or in memory, and the search for those that cannot be read."""

import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import xxhash
from PIL import Image, UnidentifiedImageError

from train.errors import DataError
from train.faults import pulse
from zoo.errors import ImageError
from zoo.preprocess import DEFAULT_LIMITS, FORMATS, decode_image

_SHOWN = 5
_THREADS = 8


@dataclass(frozen=True)
class Images:
    """Images with a name and a label each, in a fixed order."""

    names: tuple[str, ...]
    """Unique, relative to the set's own folder, with forward slashes: the same on every machine."""
    labels: tuple[int, ...]
    """Index into the class names."""
    contents: tuple[bytes | Path, ...]
    """The image file's bytes, or where it lies."""

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> bytes:
        """Return the bytes of one image file.

        Raises:
            DataError: If its file cannot be read; names the path.
        """
        content = self.contents[index]
        if isinstance(content, bytes):
            return content
        try:
            return content.read_bytes()
        except OSError as error:
            raise DataError(f"{content}: cannot be read ({error.strerror or error})") from error

    def decode(self, index: int) -> Image.Image:
        """Return one image, upright RGB.

        Raises:
            DataError: If it is damaged; names the path.
        """
        data = self.read(index)
        try:
            return decode_image(data)
        except ImageError as error:
            raise DataError(f"{self.where(index)}: {error}") from error

    def where(self, index: int) -> str:
        """Return what to call one image in a message: its path, or its name if it is in memory."""
        content = self.contents[index]
        return self.names[index] if isinstance(content, bytes) else str(content)

    def select(self, indices: Iterable[int]) -> Self:
        """Return the images at `indices`, in that order."""
        chosen = list(indices)
        return type(self)(
            tuple(self.names[i] for i in chosen),
            tuple(self.labels[i] for i in chosen),
            tuple(self.contents[i] for i in chosen),
        )

    def fingerprint(self, class_names: Sequence[str], *, with_bytes: bool) -> str:
        """Hash class names, image names and labels, and the images' bytes or, far cheaper, their sizes alone.

        Returns:
            The xxh3_128 digest, 32 hexadecimal digits; the same on every machine.
        """
        digest = xxhash.xxh3_128()
        for text in ("classes", *class_names, "images"):
            _update(digest, text.encode(errors="surrogateescape"))
        for index, (name, label) in enumerate(zip(self.names, self.labels, strict=True)):
            _update(digest, name.encode(errors="surrogateescape"))
            _update(digest, str(label).encode())
            content = self.contents[index]
            if with_bytes or isinstance(content, bytes):
                _update(digest, self.read(index))
            else:
                _update(digest, str(content.stat().st_size).encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class Split:
    """The two parts of a data set and the classes of both."""

    train: Images
    val: Images
    class_names: tuple[str, ...]


def find_bad(images: Images, *, decode: bool) -> dict[int, str]:
    """Look for images that cannot be read.

    Args:
        images: Where to look; those in memory are taken to be sound.
        decode: Decode each whole file; else read its header only, which misses a file that is cut short.

    Returns:
        The fault of each bad image, by its index.
    """
    paths = [(i, content) for i, content in enumerate(images.contents) if isinstance(content, Path)]
    with warnings.catch_warnings(), ThreadPoolExecutor(_THREADS) as pool:
        warnings.simplefilter("ignore")  # Pillow's own on large or odd files: the limits below decide
        faults = pool.map(lambda item: _find_fault(item[1], decode=decode), paths)
        bad = {}
        for (i, _), fault in zip(paths, faults, strict=True):
            pulse.touch()
            if fault:
                bad[i] = fault
        return bad


def drop_or_refuse_bad(images: Images, policy: Literal["error", "skip"]) -> tuple[Images, list[str]]:
    """Apply the policy for bad images.

    Returns:
        The sound images, and a line for each that was left out.

    Raises:
        DataError: If the policy is "error" and there is one; names the first and counts all.
    """
    bad = find_bad(images, decode=policy == "skip")
    lines = [f"{images.where(i)}: {fault}" for i, fault in bad.items()]
    if bad and policy == "error":
        more = f"; and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        raise DataError(
            f"{len(bad)} of {len(images)} images cannot be read: {'; '.join(lines[:_SHOWN])}{more}. "
            "Mend or remove them, or leave them out with --data.on_bad_image skip"
        )
    return images.select(i for i in range(len(images)) if i not in bad), lines


def _find_fault(path: Path, *, decode: bool) -> str | None:
    try:
        if decode:
            decode_image(path.read_bytes())
        elif path.stat().st_size == 0:
            return "the image is empty (0 bytes)"
        else:
            with Image.open(path, formats=FORMATS) as image:
                pixels = image.width * image.height
                if pixels > DEFAULT_LIMITS.max_pixels:
                    return f"{pixels} pixels, more than the limit of {DEFAULT_LIMITS.max_pixels}"
    except ImageError as error:
        return str(error)
    except UnidentifiedImageError:
        return f"not an image in one of the formats {', '.join(FORMATS)}"
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return " ".join(str(error).split())
    return None


def _update(digest: xxhash.xxh3_128, data: bytes) -> None:
    digest.update(len(data).to_bytes(8, "little"))  # so that "ab", "c" is not "a", "bc"
    digest.update(data)
