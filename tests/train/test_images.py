import io

import pytest
from PIL import Image

from train.errors import DataError
from train.images import Images, drop_or_refuse_bad, find_bad


def jpeg(side=64):
    file = io.BytesIO()
    Image.effect_noise((side, side), 80).convert("RGB").save(file, "JPEG")
    return file.getvalue()


@pytest.fixture
def images(tmp_path):
    """Four sound files, and one of each kind of damage."""
    whole = jpeg()
    damage = {"cut.jpg": whole[: len(whole) // 2], "zero.jpg": b"", "page.jpg": b"<html></html>"}
    files = {**{f"ok{i}.jpg": whole for i in range(4)}, **damage}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    return Images(tuple(files), (0, 1) * 3 + (0,), tuple(tmp_path / name for name in files))


def test_header_scan_finds_empty_and_foreign_files(images):
    bad = find_bad(images, decode=False)
    assert {images.names[i] for i in bad} == {"zero.jpg", "page.jpg"}
    assert bad[5] == "the image is empty (0 bytes)"
    assert bad[6].startswith("not an image in one of the formats JPEG")


def test_whole_scan_finds_the_file_cut_short_too(images):
    assert {images.names[i] for i in find_bad(images, decode=True)} == {"cut.jpg", "zero.jpg", "page.jpg"}


def test_error_policy_names_paths_and_counts(images, tmp_path):
    with pytest.raises(DataError, match=r"2 of 7 images cannot be read: .*zero\.jpg: the image is empty") as caught:
        drop_or_refuse_bad(images, "error")
    assert str(tmp_path / "page.jpg") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_skip_policy_leaves_the_bad_ones_out_and_tells_each(images):
    sound, lines = drop_or_refuse_bad(images, "skip")
    assert sound.names == ("ok0.jpg", "ok1.jpg", "ok2.jpg", "ok3.jpg")
    assert sound.labels == (0, 1, 0, 1)
    assert len(lines) == 3


def test_damage_found_at_use_names_the_path(images):
    with pytest.raises(DataError, match=r"cut\.jpg: the image is damaged"):
        images.decode(4)
    images.contents[0].unlink()
    with pytest.raises(DataError, match=r"ok0\.jpg: cannot be read"):
        images.read(0)


def test_image_beyond_the_limit_is_found_by_its_header(tmp_path):
    Image.new("1", (10_000, 5_001)).save(tmp_path / "big.png")
    images = Images(("big.png",), (0,), (tmp_path / "big.png",))
    assert "50010000 pixels, more than the limit" in find_bad(images, decode=False)[0]


def test_fingerprint_depends_on_each_thing_it_names(tmp_path):
    (tmp_path / "x").write_bytes(b"ab")
    base = Images(("a", "b"), (0, 1), (tmp_path / "x", b"cd"))
    prints = [base.fingerprint(("p", "q"), with_bytes=True)]
    assert prints[0] == base.fingerprint(("p", "q"), with_bytes=True)
    assert len(prints[0]) == 32
    prints.append(base.fingerprint(("p", "r"), with_bytes=True))
    prints.append(Images(("a", "c"), (0, 1), base.contents).fingerprint(("p", "q"), with_bytes=True))
    prints.append(Images(("a", "b"), (1, 1), base.contents).fingerprint(("p", "q"), with_bytes=True))
    prints.append(base.select([1, 0]).fingerprint(("p", "q"), with_bytes=True))
    by_size = base.fingerprint(("p", "q"), with_bytes=False)
    (tmp_path / "x").write_bytes(b"aB")
    prints.append(base.fingerprint(("p", "q"), with_bytes=True))
    assert base.fingerprint(("p", "q"), with_bytes=False) == by_size
    (tmp_path / "x").write_bytes(b"abc")
    assert base.fingerprint(("p", "q"), with_bytes=False) != by_size
    assert len(set(prints)) == len(prints)


def test_fingerprint_is_pinned_for_other_machines():
    images = Images(("a/1.png",), (0,), (b"x",))
    assert images.fingerprint(("a",), with_bytes=True) == images.fingerprint(("a",), with_bytes=False)
    assert images.fingerprint(("a",), with_bytes=True) == "0a87292d1c27b1100d723da1f8f844f2"
