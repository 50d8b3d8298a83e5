"""Image files through HTTP: what is none is a 422, and what is one is seen as training's evaluation sees it."""

import io
import zipfile
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from serve.predictor import Predictor
from zoo.preprocess import preprocess

PIXELS = np.random.default_rng(7).integers(0, 256, (40, 50, 3), dtype=np.uint8)
PICTURE = Image.fromarray(PIXELS)


def encode(image: Image.Image, form: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.png", encode(PICTURE, "PNG"))
    return file.getvalue()


def damage(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes(64) + data[middle + 64 :]


BAD = {
    "nothing": b"",
    "one byte": b"\x89",
    "a signature alone": b"\x89PNG\r\n\x1a\n",
    "html": b"<!doctype html><html></html>",
    "svg": b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>',
    "pdf": b"%PDF-1.7\n1 0 obj\n<<>>\nendobj\n",
    "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n",
    "zip": zipped(),
    "zlib": zlib.compress(bytes(1000)),
    "json": b'{"inputs": []}',
    "text": "日本".encode("utf-16"),
    "random bytes": np.random.default_rng(0).bytes(5000),
    "icon": encode(PICTURE, "ICO"),
    "portable pixmap": encode(PICTURE, "PPM"),
    "truncated png": encode(PICTURE, "PNG")[:-100],
    "truncated jpeg": encode(PICTURE, "JPEG")[:-100],
    "truncated webp": encode(PICTURE, "WEBP")[:-100],
    "truncated gif": encode(PICTURE, "GIF")[:300],
    "truncated bmp": encode(PICTURE, "BMP")[:-100],
    "truncated tiff": encode(PICTURE, "TIFF")[:-300],
    "damaged png": damage(encode(PICTURE, "PNG")),
    "a png that says it has no pixels": encode(PICTURE, "PNG").replace(b"\0\0\0\x32\0\0\0\x28", bytes(8)),
    "floating-point pixels": encode(Image.new("F", (8, 8)), "TIFF"),
    "too many pixels": encode(Image.new("1", (200, 51)), "PNG"),
    "a long thin image": encode(Image.new("1", (1, 9_999)), "PNG"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("kind", ["image/png", "application/octet-stream"])
def test_what_is_no_image_is_422(client: TestClient, name: str, kind: str) -> None:
    response = client.post("/invocations", content=BAD[name], headers={"content-type": kind})
    assert response.status_code == 422, response.text
    error = response.json()["error"]
    assert error["code"] == "bad_image"
    assert "\n" not in error["message"]
    assert "site-packages" not in error["message"]


def test_a_bad_image_is_named_and_hurts_no_other_request(client: TestClient, images: list[bytes]) -> None:
    files = [("f", ("a.png", data)) for data in (images[0], BAD["truncated png"], images[1])]
    response = client.post("/invocations", files=files)
    assert response.status_code == 422
    assert response.json()["error"]["message"].startswith("image 1: ")
    good = client.post("/invocations", content=images[0], headers={"content-type": "image/png"})
    assert good.status_code == 200


def rotated(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(PICTURE, "JPEG", quality=95, exif=exif)


def sixteen_bit() -> Image.Image:
    return Image.fromarray(np.random.default_rng(3).integers(0, 65536, (40, 50), dtype=np.uint16))


def transparent() -> Image.Image:
    image = PICTURE.convert("RGBA")
    image.putalpha(Image.fromarray(PIXELS[:, :, 0]))
    return image


def animated(form: str) -> bytes:
    others = [Image.new("RGB", PICTURE.size, colour) for colour in ("red", "green")]
    return encode(PICTURE, form, save_all=True, append_images=others, duration=40, lossless=True)


GOOD: dict[str, Callable[[], bytes]] = {
    "cmyk jpeg": lambda: encode(PICTURE.convert("CMYK"), "JPEG"),
    "grey jpeg": lambda: encode(PICTURE.convert("L"), "JPEG"),
    "progressive jpeg": lambda: encode(PICTURE, "JPEG", progressive=True),
    "rotated jpeg": lambda: rotated(6),
    "mirrored jpeg": lambda: rotated(2),
    "16-bit png": lambda: encode(sixteen_bit(), "PNG"),
    "16-bit tiff": lambda: encode(sixteen_bit(), "TIFF"),
    "palette png": lambda: encode(PICTURE.quantize(16), "PNG"),
    "palette png with a transparent colour": lambda: encode(PICTURE.quantize(16), "PNG", transparency=3),
    "transparent png": lambda: encode(transparent(), "PNG"),
    "transparent webp": lambda: encode(transparent(), "WEBP", lossless=True),
    "animated gif": lambda: animated("GIF"),
    "animated webp": lambda: animated("WEBP"),
    "animated png": lambda: animated("PNG"),
    "tiff of several pages": lambda: animated("TIFF"),
    "bmp": lambda: encode(PICTURE, "BMP"),
}


@pytest.mark.parametrize("name", GOOD)
def test_good_images_are_answered_as_evaluation_sees_them(client: TestClient, predictor: Predictor, name: str) -> None:
    data = GOOD[name]()
    response = client.post("/invocations", content=data, headers={"content-type": "image/png"})
    assert response.status_code == 200, response.text
    wanted = predictor.label(preprocess(data, predictor.card.preprocessing)[None])
    assert response.json()["predictions"] == [prediction.model_dump() for prediction in wanted]


@pytest.mark.parametrize("name", ["animated gif", "animated webp", "animated png", "tiff of several pages"])
def test_the_first_frame_is_what_counts(client: TestClient, name: str) -> None:
    form = {"gif": "GIF", "webp": "WEBP", "png": "PNG", "pages": "TIFF"}[name.split()[-1]]
    answers = [
        client.post("/invocations", content=data, headers={"content-type": "image/gif"}).json()
        for data in (GOOD[name](), encode(PICTURE, form, lossless=True))
    ]
    assert answers[0] == answers[1]


def test_a_rotated_image_is_turned_upright(client: TestClient) -> None:
    turned = np.asarray(Image.open(io.BytesIO(rotated(1))).transpose(Image.Transpose.ROTATE_270))
    upright = encode(Image.fromarray(turned), "PNG")
    answers = [
        client.post("/invocations", content=data, headers={"content-type": "image/png"}).json()
        for data in (rotated(6), upright, rotated(1))
    ]
    assert answers[0] == answers[1] != answers[2]
