"""Small files that would cost much: refused from the header, before memory is taken or work is done."""

import io
import struct
import sys
import zlib
from pathlib import Path

import pytest
from PIL import Image

from zoo.errors import ImageError
from zoo.preprocess import MAX_REREADS, MAX_SCANS, decode_image


def encode(image: Image.Image, form: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *chunks: bytes, pixels: int = 100) -> bytes:
    head = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    data = png_chunk(b"IDAT", zlib.compress(bytes(4 * pixels)))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + data + png_chunk(b"IEND", b"")


def webp(width: int, height: int) -> bytes:
    """An animation whose canvas is larger than its one frame."""
    frame = encode(Image.new("RGB", (16, 16)), "WEBP", lossless=True)[12:]
    canvas = struct.pack("<I", width - 1)[:3] + struct.pack("<I", height - 1)[:3]
    size = struct.pack("<I", 15)[:3]
    frame = bytes(6) + size + size + bytes(4) + frame
    parts = b"VP8X" + struct.pack("<I", 10) + b"\2\0\0\0" + canvas + b"ANIM" + struct.pack("<I", 6) + bytes(6)
    parts += b"ANMF" + struct.pack("<I", len(frame)) + frame
    return b"RIFF" + struct.pack("<I", 4 + len(parts)) + b"WEBP" + parts


def gif(side: int, *, frame: bool = False) -> bytes:
    data = bytearray(encode(Image.new("P", (60, 60)), "GIF"))
    at = data.index(b"\x2c") + 5 if frame else 6
    data[at : at + 4] = struct.pack("<HH", side, side)
    return bytes(data)


def bmp(width: int, height: int) -> bytes:
    data = bytearray(encode(Image.new("L", (8, 8)), "BMP"))
    data[18:26] = struct.pack("<ii", width, height)
    return bytes(data)


def tiff(width: int, height: int, strips: int, strip_bytes: int) -> bytes:
    """A TIFF whose strips are all the same bytes."""
    offsets = 8 + strip_bytes
    counts = offsets + 4 * strips
    tags = [
        (256, width),
        (257, height),
        (258, 8),
        (259, 5),
        (262, 1),
        (273, offsets),
        (277, 1),
        (278, 1),
        (279, counts),
    ]
    data = b"II*\0" + struct.pack("<I", counts + 4 * strips) + bytes(strip_bytes)
    data += struct.pack("<I", 8) * strips + struct.pack("<I", strip_bytes) * strips + struct.pack("<H", len(tags))
    for tag, value in tags:
        data += struct.pack("<HHII", tag, 4, strips if tag in (273, 279) else 1, value)
    return data + struct.pack("<I", 0)


def jpeg(scans: int) -> bytes:
    data = encode(Image.new("RGB", (64, 64)), "JPEG", progressive=True)
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last * (scans - data.count(b"\xff\xda")) + data[-2:]


BOMBS = {
    "png of a huge size": (png(60_000, 60_000), "has 60000 x 60000 pixels"),
    "png of a compressed text": (png(10, 10, png_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**24)))), "too large"),
    "png of a profile": (png(10, 10, png_chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(2**24)))), "too large"),
    "webp of a huge canvas": (webp(65_535, 65_535), "pixels"),
    "gif of a huge screen": (gif(65_535), "has 65535 x 65535 pixels"),
    "gif of a huge frame": (gif(65_535, frame=True), "pixels"),
    "bmp of a huge size": (bmp(2**31 - 1, 2**31 - 1), "pixels"),
    "bmp of a negative size": (bmp(-(2**31), -(2**31)), "pixels|damaged"),
    "tiff of a huge size": (tiff(60_000, 60_000, 1, 64), "has 60000 x 60000 pixels"),
    "tiff of one strip again and again": (tiff(8, 2_000, 2_000, 2**20), "same bytes again and again"),
    "jpeg of endless scans": (jpeg(MAX_SCANS + 1), f"more than {MAX_SCANS} scans"),
}


def peak_bytes(*, reset: bool = False) -> int:
    """Say the most memory that this process has held, since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory from /proc")
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_without_taking_memory(name: str) -> None:
    data, message = BOMBS[name]
    before = peak_bytes(reset=True)
    with pytest.raises(ImageError, match=message):
        decode_image(data)
    assert peak_bytes() - before < 2**25


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory from /proc")
def test_the_peak_is_seen_where_an_image_takes_memory() -> None:
    data = png(7_000, 7_000, pixels=7_000**2)
    before = peak_bytes(reset=True)
    decode_image(data)
    assert peak_bytes() - before > 2**25


def test_as_many_scans_as_encoders_make_are_read() -> None:
    assert decode_image(jpeg(MAX_SCANS)).size == (64, 64)


def test_strips_may_be_shared_a_few_times() -> None:
    with pytest.raises(ImageError, match="damaged"):  # by its pixels, which are none
        decode_image(tiff(8, MAX_REREADS, MAX_REREADS, 2**12))


def test_only_the_first_of_very_many_frames_is_decoded() -> None:
    frames = [Image.new("L", (50, 50), i % 256) for i in range(1, 500)]
    data = encode(Image.new("L", (50, 50), 255), "GIF", save_all=True, append_images=frames)
    assert decode_image(data).getpixel((3, 3)) == (255, 255, 255)
