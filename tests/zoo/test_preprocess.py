import io
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import numpy as np
import pytest
import timm.data
from PIL import Image, ImageFile

from zoo import preprocess as preprocess_module
from zoo.card import Preprocessing
from zoo.errors import ImageError
from zoo.preprocess import BACKGROUND, FORMATS, ImageLimits, decode_image, preprocess, transform_image

HALVES = (0.5, 0.5, 0.5)


def encode(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    rng = np.random.default_rng([width, height])
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).convert(mode)


def preprocessing(**fields: object) -> Preprocessing:
    return Preprocessing.model_validate({"size": (32, 32), "mean": HALVES, "std": HALVES} | fields)


IMAGES = [(32, 32), (33, 57), (101, 40), (7, 5), (1, 90), (64, 64)]
SIZES = [(32, 32), (24, 40), (8, 8)]


@pytest.mark.parametrize("mode", ["center", "squash", "border"])
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos"])
def test_transform_equals_timm_bit_for_bit(mode: str, interpolation: str) -> None:
    for (width, height), size, crop_pct in product(IMAGES, SIZES, (0.875, 0.95, 1.0, 1.15)):
        if mode == "border" and (width, height) == (1, 90):
            continue  # the fitted image has no pixels: see the test below
        mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
        config = {"input_size": (3, *size), "crop_pct": crop_pct, "crop_mode": mode, "interpolation": interpolation}
        config |= {"mean": mean, "std": std}
        image = noise(width, height)
        theirs = timm.data.create_transform(**config, is_training=False)(image).numpy()
        ours = transform_image(image, Preprocessing.from_timm(config))
        assert ours.dtype == np.float32
        assert ours.tobytes() == theirs.tobytes(), (width, height, size, crop_pct)


def test_an_image_too_narrow_to_fit_is_refused() -> None:
    with pytest.raises(ImageError, match=r"resized to fit has no pixels \(0 x 32\)"):
        transform_image(noise(1, 90), preprocessing(crop_mode="border"))


def test_an_image_that_resizing_would_blow_up_is_refused() -> None:
    with pytest.raises(ImageError, match="resized to fit has 32 x 320000 pixels, more than the limit of 10000000"):
        transform_image(Image.new("RGB", (1, 10_000)), preprocessing(), ImageLimits(max_pixels=10_000_000))


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_on_the_list_is_read(form: str) -> None:
    decoded = decode_image(encode(Image.new("RGB", (5, 4), (200, 100, 50)), form))
    assert decoded.mode == "RGB"
    assert decoded.size == (5, 4)
    assert np.abs(np.asarray(decoded, int) - [200, 100, 50]).max() <= 3  # JPEG and WebP lose a little


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr", "RGBA", "LA"])
def test_every_mode_becomes_rgb_of_the_same_colour(mode: str) -> None:
    form = "PNG" if mode in ("1", "L", "P", "RGBA", "LA") else "TIFF"
    decoded = decode_image(encode(noise(9, 6, mode), form))
    assert decoded.mode == "RGB"
    assert decoded.tobytes() == noise(9, 6, mode).convert("RGB").tobytes()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "RGB", "I;16"])
def test_transparent_areas_show_the_background(mode: str) -> None:
    if mode in ("RGBA", "LA"):
        data = encode(Image.new("RGBA", (2, 1), (0, 0, 0, 0)).convert(mode))
    elif mode == "RGB":
        data = encode(Image.new("RGB", (2, 1), (1, 2, 3)), transparency=(1, 2, 3))
    elif mode == "I;16":
        data = encode(Image.fromarray(np.full((1, 2), 300, np.uint16)), transparency=300)
    else:
        data = encode(Image.new(mode, (2, 1), 0), transparency=0)
    assert decode_image(data).getpixel((0, 0)) == BACKGROUND


def test_half_transparent_mixes_with_the_background() -> None:
    assert decode_image(encode(Image.new("RGBA", (1, 1), (255, 0, 0, 128)))).getpixel((0, 0)) == (255, 127, 127)


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_a_sixteen_bit_ramp_stays_a_ramp(form: str) -> None:
    ramp = np.linspace(0, 65535, 1024).round().astype(np.uint16)[None]
    decoded = np.asarray(decode_image(encode(Image.fromarray(ramp), form)))
    assert np.array_equal(decoded[0, :, 0], np.rint(ramp[0] / 257).astype(np.uint8))
    normalised = preprocess(encode(Image.fromarray(np.repeat(ramp, 64, 0)), form), preprocessing(crop_mode="squash"))
    assert abs(normalised.mean()) < 1e-2  # 2.44 with ImageNet's numbers when clipped to white


@pytest.mark.parametrize(("kind", "bits"), [(np.float32, "floating-point"), (np.int32, "32-bit")])
def test_pixels_of_unknown_range_are_refused(kind: type, bits: str) -> None:
    with pytest.raises(ImageError, match=bits):
        decode_image(encode(Image.fromarray(np.full((2, 2), 70_000, kind)), "TIFF"))


@pytest.mark.parametrize("mode", ["RGB", "L", "I;16"])
@pytest.mark.parametrize(("orientation", "corner"), [(1, (0, 0)), (3, (3, 1)), (6, (1, 0)), (8, (0, 3))])
def test_rotated_cameras_are_made_upright(mode: str, orientation: int, corner: tuple[int, int]) -> None:
    pixels = np.zeros((2, 4), np.uint16 if mode == "I;16" else np.uint8)
    pixels[0, 0] = np.iinfo(pixels.dtype).max
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(pixels) if mode == "I;16" else Image.fromarray(pixels).convert(mode)
    decoded = decode_image(encode(image, exif=exif))
    assert decoded.getpixel(corner) == (255, 255, 255)
    assert np.asarray(decoded).sum() == 3 * 255


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG", "TIFF"])
def test_the_first_frame_of_an_animation_counts(form: str) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "lime", "blue")]
    options = {"lossless": True} if form == "WEBP" else {}
    data = encode(frames[0], form, save_all=True, append_images=frames[1:], **options)
    assert decode_image(data).getpixel((1, 1)) == (255, 0, 0)


GOOD = encode(noise(64, 64))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"empty \(0 bytes\)"),
        (b"not an image at all", "not an image in one of the formats JPEG, PNG"),
        (b"<!doctype html><html></html>", "not an image in one of the formats"),
        (b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>", "not an image in one of the formats"),
        (encode(noise(8, 8), "PPM"), "not an image in one of the formats"),
        (encode(noise(8, 8), "ICO"), "not an image in one of the formats"),
        (GOOD[: len(GOOD) // 2], "damaged"),
        (GOOD[:20], "damaged"),
        (GOOD[:8], "damaged"),
        (GOOD[:8] + b"\0" * 100, "damaged"),
        (encode(noise(64, 64), "JPEG")[:900], "damaged"),
        (encode(noise(64, 64), "GIF")[:900], "damaged"),
        (encode(noise(64, 64), "WEBP")[:900], "damaged"),
        (encode(noise(64, 64), "BMP")[:900], "damaged"),
        (encode(noise(64, 64), "TIFF")[:900], "damaged"),
        (GOOD[:16] + bytes(8) + GOOD[24:], "damaged|no pixels"),
    ],
)
def test_what_is_no_image_is_refused_in_one_line(data: bytes, message: str) -> None:
    with pytest.raises(ImageError, match=message) as caught:
        decode_image(data)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def png_header(width: int, height: int) -> bytes:
    """A PNG that says how large it is, and holds nothing: decoding it would fail with another message."""
    data = encode(Image.new("1", (1, 1)))
    import struct
    import zlib

    header = b"IHDR" + struct.pack(">II", width, height) + data[24:29]
    return data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]


@pytest.mark.parametrize(("width", "height"), [(9_000, 9_000), (30_000, 30_000), (2**31 - 1, 2**31 - 1)])
def test_size_is_checked_from_the_header_without_a_warning(width: int, height: int) -> None:
    with warnings.catch_warnings(record=True) as leaked:
        warnings.simplefilter("always")
        with pytest.raises(ImageError, match=f"{width} x {height} pixels, more than the limit of 50000000"):
            decode_image(png_header(width, height))
    assert leaked == []


def test_the_limit_counts_pixels_exactly() -> None:
    decode_image(GOOD, ImageLimits(max_pixels=64 * 64))
    with pytest.raises(ImageError, match="64 x 64 pixels, more than the limit of 4095"):
        decode_image(GOOD, ImageLimits(max_pixels=64 * 64 - 1))


def test_room_is_held_while_an_image_of_so_many_pixels_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[object] = []

    @contextmanager
    def room(pixels: int) -> Iterator[None]:
        events.append(pixels)
        yield
        events.append("left")

    real = preprocess_module._to_rgb
    monkeypatch.setattr(preprocess_module, "_to_rgb", lambda image: [events.append("decoding"), real(image)][1])
    file = io.BytesIO()
    Image.new("RGBA", (30, 20)).save(file, "PNG")
    decode_image(file.getvalue(), ImageLimits(room=room))
    assert events == [600, "decoding", "left"]
    with pytest.raises(ImageError):
        decode_image(file.getvalue(), ImageLimits(max_pixels=599, room=room))
    assert len(events) == 3  # what is too large takes none


def test_pillow_keeps_its_global_state() -> None:
    before = (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)
    with pytest.raises(ImageError):
        decode_image(GOOD[:900])
    assert before == (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)


@pytest.mark.slow
def test_no_torch_is_imported() -> None:
    code = "import sys, zoo.preprocess; sys.exit('torch' in sys.modules or 'torchvision' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
