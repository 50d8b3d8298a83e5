import os

import pytest

from serve.client.files import expand, read_key


def test_folders_give_their_images_sorted_and_files_come_as_they_are(tmp_path):
    for name in ("b/2.PNG", "b/1.jpeg", "b/c/3.webp", "b/notes.txt", "b/model.onnx", "odd.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    (tmp_path / "b" / "folder.png").mkdir()
    files = expand([tmp_path / "odd.bin", tmp_path / "b", tmp_path / "odd.bin"])
    names = [str(file.relative_to(tmp_path)) for file in files]
    assert names == ["odd.bin", "b/1.jpeg", "b/2.PNG", "b/c/3.webp", "odd.bin"]


def test_what_is_not_there_and_a_folder_without_images_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"cat\.png: no such file or folder"):
        expand([tmp_path, tmp_path / "cat.png"][1:])
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match=rf"{tmp_path.name}: no image in this folder \(wanted is a name in \.bmp, "):
        expand([tmp_path])


KEY = "0123456789abcdef"


@pytest.mark.parametrize("text", [KEY, f"{KEY}\n", f"# ours\n\n  team:{KEY}  \r\nother:{KEY}x\n"])
def test_key_is_the_first_of_the_file(tmp_path, text):
    (tmp_path / "key").write_text(text)
    assert read_key(tmp_path / "key") == KEY


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no API key in this file"),
        (b"# only\n\n", "no API key in this file"),
        (b"team:\n", "no API key in this file"),
        (b"\xff", "cannot be read: not UTF-8"),
        ("schlüssel-0123456".encode(), "visible ASCII without spaces"),
        (b"two words 0123456", "visible ASCII without spaces"),
    ],
)
def test_a_file_without_a_key_is_named_and_nothing_of_it_told(tmp_path, content, message):
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(ValueError, match=f"{tmp_path / 'key'}: .*{message}") as caught:
        read_key(tmp_path / "key")
    assert "0123456" not in str(caught.value)


def test_a_key_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ValueError, match="key: the API key cannot be read: No such file"):
        read_key(tmp_path / "key")
    with pytest.raises(ValueError, match=f"{tmp_path.name}: the API key cannot be read: {os.strerror(21)}"):
        read_key(tmp_path)
