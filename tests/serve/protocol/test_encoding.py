import base64
import io

import pytest
from PIL import Image

from serve.protocol.encoding import decode_base64, decode_cell
from zoo.errors import ImageError
from zoo.preprocess import FORMATS


def test_text_may_have_line_breaks() -> None:
    data = bytes(range(256))
    assert decode_base64(base64.encodebytes(data).decode()) == data
    assert decode_base64(base64.b64encode(data).decode()) == data


@pytest.mark.parametrize("text", ["a", "a===", "!!!!", "_-_-", "é===", "\ud800"])
def test_text_that_is_no_base64_is_refused(text: str) -> None:
    with pytest.raises(ImageError, match="not valid base64"):
        decode_base64(text)


def test_a_cell_may_be_bytes_or_base64_as_text_or_bytes(images: list[bytes], texts: list[str]) -> None:
    for image, text in zip(images, texts, strict=True):
        assert decode_cell(image) == decode_cell(text) == decode_cell(text.encode()) == image


@pytest.mark.parametrize("form", FORMATS)
def test_no_image_format_is_taken_for_base64(form: str) -> None:
    file = io.BytesIO()
    Image.new("RGB", (1, 1)).save(file, form)
    assert decode_cell(file.getvalue()) == file.getvalue()


@pytest.mark.parametrize("cell", [None, 3, 1.5, True, ["aGk="], {"b64": "aGk="}])
def test_other_cells_are_refused_by_type(cell: object) -> None:
    with pytest.raises(ImageError, match=f"got {type(cell).__name__}"):
        decode_cell(cell)
