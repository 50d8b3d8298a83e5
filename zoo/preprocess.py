"""From the bytes of an image to the model's input. Training's evaluation and the endpoint both call this; no torch.

Every image becomes 8-bit RGB, upright, its first frame only. Transparent areas show `BACKGROUND`.
"""

import io
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import IO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, TiffImagePlugin

from zoo.card import Preprocessing
from zoo.errors import ImageError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
BACKGROUND = (255, 255, 255)
"""The colour behind transparent areas: white."""

MAX_SCANS = 100
"""Most scans of a JPEG; encoders make about 10, and each is work on all pixels, however few its bytes are."""
MAX_REREADS = 16
"""Most times that the strips or tiles of a TIFF may go over its bytes; equal tiles are shared by some programs."""

_START_OF_SCAN = b"\xff\xda"
_SIXTEEN_BIT = ("I;16", "I;16L", "I;16B", "I;16N")


@dataclass(frozen=True)
class ImageLimits:
    """What an image may cost."""

    max_pixels: int = 50_000_000
    """Largest width times height, of the image itself and of what it is resized to."""
    room: Callable[[int], AbstractContextManager[object]] = lambda _pixels: nullcontext()
    """Entered with the number of pixels while they are decoded: whoever decodes in several threads bounds memory by it.
    Decoding takes up to 21 bytes for a pixel, what is decoded 4."""


DEFAULT_LIMITS = ImageLimits()


def preprocess(data: bytes, preprocessing: Preprocessing, limits: ImageLimits = DEFAULT_LIMITS) -> NDArray[np.float32]:
    """Decode an image file and make it the model's input.

    Args:
        data: The bytes of a file in one of `FORMATS`.
        preprocessing: The card's part that says how.
        limits: What the image may cost.

    Returns:
        The input, (3, height, width).

    Raises:
        ImageError: If the bytes are no such image, or one beyond the limits.
    """
    return transform_image(decode_image(data, limits), preprocessing, limits)


def decode_image(data: bytes, limits: ImageLimits = DEFAULT_LIMITS) -> Image.Image:
    """Decode an image file to an upright RGB image.

    Raises:
        ImageError: If `data` is empty, truncated, not in one of `FORMATS`, or has more than `limits.max_pixels`.
    """
    if not data:
        raise ImageError("the image is empty (0 bytes)")
    try:
        with _open(io.BytesIO(data)) as image:
            _check_pixels(image.width, image.height, limits)
            _check_work(image, data)
            with limits.room(image.width * image.height):
                image.load()
                ImageOps.exif_transpose(image, in_place=True)
                return _to_rgb(image)
    except (ImageError, MemoryError):
        raise
    except Exception as error:  # decoders raise a dozen unrelated types on damaged bytes
        raise ImageError(f"the image is damaged ({_one_line(error)})") from error


def transform_image(
    image: Image.Image, preprocessing: Preprocessing, limits: ImageLimits = DEFAULT_LIMITS
) -> NDArray[np.float32]:
    """Resize, crop and normalise as `timm.data.create_transform(is_training=False)` does, bit for bit.

    Args:
        image: An RGB image.
        preprocessing: The card's part that says how.
        limits: Bounds the resized image: fitting the short side of a very long image makes it huge.

    Returns:
        The input, (3, height, width).

    Raises:
        ImageError: If the resized image would have more than `limits.max_pixels`.
    """
    height, width = _resized(image, preprocessing)
    _check_pixels(width, height, limits, "the image resized to fit")
    if (width, height) != image.size:
        image = image.resize((width, height), Image.Resampling[preprocessing.interpolation.upper()])
    fill = (0, 0, 0)
    if preprocessing.crop_mode == "border":
        red, green, blue = (round(255 * m) for m in preprocessing.mean)
        fill = (red, green, blue)
    image = _center_crop(image, preprocessing.size, fill)
    planes = np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))  # (3, height, width), while a pixel is a byte
    pixels: NDArray[np.float32] = np.divide(planes, 255, dtype=np.float32)
    pixels -= np.array(preprocessing.mean, dtype=np.float32)[:, None, None]
    pixels /= np.array(preprocessing.std, dtype=np.float32)[:, None, None]
    return pixels


def _check_pixels(width: int, height: int, limits: ImageLimits, what: str = "the image") -> None:
    if width < 1 or height < 1:
        raise ImageError(f"{what} has no pixels ({width} x {height})")
    if width * height > limits.max_pixels:
        raise ImageError(f"{what} has {width} x {height} pixels, more than the limit of {limits.max_pixels} in all")


def _check_work(image: Image.Image, data: bytes) -> None:
    """Refuse files that make a decoder go over the same pixels or bytes again and again."""
    if image.format == "JPEG" and data.count(_START_OF_SCAN) > MAX_SCANS:
        raise ImageError(f"the image is a JPEG of more than {MAX_SCANS} scans")
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        sizes = [image.tag_v2.get(tag, ()) for tag in (TiffImagePlugin.STRIPBYTECOUNTS, TiffImagePlugin.TILEBYTECOUNTS)]
        if sum(map(sum, sizes)) > MAX_REREADS * len(data):
            raise ImageError("the image is a TIFF whose strips or tiles are the same bytes again and again")


def _open(file: IO[bytes]) -> Image.Image:
    """Read the header with the first decoder of `FORMATS` that knows it.

    As Image.open does, but without its bomb check: that one warns, and a warning can be silenced only for
    all threads at once. `_check_pixels` stands in its place.
    """
    Image.init()
    prefix = file.read(16)
    for name in FORMATS:
        if name not in Image.OPEN:
            continue  # a Pillow built without this decoder
        factory, accept = Image.OPEN[name]
        if accept is None or accept(prefix) is True:
            file.seek(0)
            return factory(file, "")
    raise ImageError(f"not an image in one of the formats {', '.join(FORMATS)}")


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in (*_SIXTEEN_BIT, "I"):
        image = _to_eight_bit(image)
    if image.mode == "F":
        raise ImageError("floating-point pixels have no known range; save the image with 8 or 16 bits")
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    backdrop = Image.new("RGBA", image.size, (*BACKGROUND, 255))
    return Image.alpha_composite(backdrop, image if image.mode == "RGBA" else image.convert("RGBA")).convert("RGB")


def _to_eight_bit(image: Image.Image) -> Image.Image:
    """Scale 16-bit grey to 8 bits, rounding to nearest; Pillow's own conversion would clip at 255."""
    grey = np.asarray(image)
    if grey.min() < 0 or grey.max() > 65535:
        raise ImageError("32-bit pixels have no known range; save the image with 8 or 16 bits")
    rounded = grey.astype(np.uint32)
    rounded += 128
    rounded //= 257
    eight = Image.fromarray(rounded.astype(np.uint8))
    transparent = image.info.get("transparency")  # one grey level that stands for "nothing here"
    if isinstance(transparent, int):
        eight.putalpha(Image.fromarray(np.where(grey == transparent, 0, 255).astype(np.uint8)))
    return eight


def _resized(image: Image.Image, preprocessing: Preprocessing) -> tuple[int, int]:
    """Compute the height and width before the crop, with timm's and torchvision's own roundings."""
    target_h, target_w = (math.floor(side / preprocessing.crop_pct) for side in preprocessing.size)
    if preprocessing.crop_mode == "squash":
        return target_h, target_w
    if preprocessing.crop_mode == "center" and target_h == target_w:
        short, long = sorted(image.size)
        fitted = int(target_h * long / short)
        return (fitted, target_h) if image.width <= image.height else (target_h, fitted)
    ratios = (image.height / target_h, image.width / target_w)
    ratio = max(ratios) if preprocessing.crop_mode == "border" else min(ratios)
    return round(image.height / ratio), round(image.width / ratio)


def _center_crop(image: Image.Image, size: tuple[int, int], fill: tuple[int, int, int]) -> Image.Image:
    """Cut the middle (height, width) out, padding with `fill` where the image is smaller."""
    height, width = size
    pad_w, pad_h = max(width - image.width, 0), max(height - image.height, 0)
    if pad_w or pad_h:
        image = ImageOps.expand(image, (pad_w // 2, pad_h // 2, (pad_w + 1) // 2, (pad_h + 1) // 2), fill)
    top, left = round((image.height - height) / 2.0), round((image.width - width) / 2.0)
    return image.crop((left, top, left + width, top + height))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
