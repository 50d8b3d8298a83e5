import logging
import unicodedata

import pytest

from train.errors import DataError
from train.folders import read_folder


def make(root, *names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_bytes(b"x")
    for name in names:
        if name.endswith("/"):
            (root / name).mkdir(parents=True, exist_ok=True)
    return root


def flat(root, **classes):
    return make(root, *(f"{c}/{i}.jpg" for c, n in classes.items() for i in range(n)))


def read(root, val_fraction=0.25, split_seed=0):
    return read_folder(root, val_fraction, split_seed)


def test_flat_folder_is_split_by_class_and_seed(tmp_path):
    split = read(flat(tmp_path, b=8, a=4, c=2))
    assert split.class_names == ("a", "b", "c")
    assert [split.val.labels.count(i) for i in range(3)] == [1, 2, 1]
    assert [split.train.labels.count(i) for i in range(3)] == [3, 6, 1]
    assert set(split.train.names).isdisjoint(split.val.names)
    assert read(tmp_path) == split
    assert any(read(tmp_path, split_seed=seed).val != split.val for seed in range(1, 4))


def test_split_is_fixed_by_names_alone(tmp_path):
    names = read(flat(tmp_path / "one", a=40, b=40)).val.names
    assert read(flat(tmp_path / "two", b=40, a=40)).val.names == names
    grown = set(read(flat(tmp_path / "one", a=44, b=40)).val.names)
    assert len(set(names) - grown) <= 1  # new files push few old ones over the border


def test_class_map_of_train_holds_for_val_with_a_class_missing(tmp_path, caplog):
    flat(tmp_path / "train", a=2, b=2, c=2)
    flat(tmp_path / "val", a=1, c=1)
    with caplog.at_level(logging.WARNING):
        split = read(tmp_path)
    assert split.class_names == ("a", "b", "c")
    assert dict(zip(split.val.names, split.val.labels, strict=True)) == {"a/0.jpg": 0, "c/0.jpg": 2}
    assert "no images for class 'b'" in caplog.text


def test_empty_validation_class_warns_and_keeps_the_map(tmp_path, caplog):
    flat(tmp_path / "train", a=2, b=2, c=2)
    make(flat(tmp_path / "val", a=1, c=1), "b/")
    with caplog.at_level(logging.WARNING):
        assert read(tmp_path).val.labels == (0, 2)
    assert "no images for class 'b'" in caplog.text


def test_extra_validation_class_is_refused(tmp_path):
    flat(tmp_path / "train", a=2, b=2)
    flat(tmp_path / "val", a=1, d=1)
    with pytest.raises(DataError, match="val: class 'd' is not in the training part, which has 'a', 'b'"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["val", "validation", "test"])
def test_validation_part_goes_by_three_names(tmp_path, name):
    flat(tmp_path / "train", a=2, b=2)
    flat(tmp_path / name, a=1, b=1)
    assert (len(read(tmp_path).train), len(read(tmp_path).val)) == (4, 2)


def test_train_alone_is_split(tmp_path):
    assert len(read(flat(tmp_path / "train", a=4, b=4).parent).val) == 2


def test_class_may_be_called_train(tmp_path):
    assert read(flat(tmp_path, train=4, val=4)).class_names == ("train", "val")


def test_folder_beside_the_parts_is_told(tmp_path, caplog):
    flat(tmp_path / "train", a=4, b=4)
    make(tmp_path, "extra/x.jpg")
    with caplog.at_level(logging.WARNING):
        read(tmp_path)
    assert "extra is not used" in caplog.text


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), r"no images \(\.jpg"),
        (("a/", "b/"), r"no images \(\.jpg"),
        (("a/readme.txt", "b/readme.txt"), r"no images \(\.jpg"),
        (("1.jpg", "2.jpg"), "2 images outside any class folder"),
        (("a/1.jpg", "a/2.jpg"), "one class only, 'a'"),
        (("a/1.jpg", "a/2.jpg", "b/", "c/"), "no images for class 'b', 'c'"),
        (("a/1.jpg", "a/2.jpg", "b/1.jpg"), "class 'b' has one image, b/1.jpg"),
        (("train/a/1.jpg", "train/b/1.jpg", "val/"), r"val: no images"),
    ],
)
def test_folder_that_cannot_be_trained_on_is_one_clear_line(tmp_path, names, message):
    with pytest.raises(DataError, match=message) as caught:
        read(make(tmp_path, *names))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value) or "b/1.jpg" in str(caught.value)


def test_root_that_is_missing_or_a_file_is_named(tmp_path):
    with pytest.raises(DataError, match="none: no such folder"):
        read(tmp_path / "none")
    with pytest.raises(DataError, match="file: not a folder"):
        read(make(tmp_path, "file") / "file")


def test_hidden_files_other_files_and_capitals(tmp_path):
    make(tmp_path, "a/1.JPG", "a/2.Png", "a/.3.jpg", "a/notes.txt", ".git/x.jpg", "a/.thumbs/4.jpg", "a/deep/5.jpeg")
    make(tmp_path, "b/1.webp", "b/2.TIFF")
    split = read(tmp_path)
    assert split.class_names == ("a", "b")
    assert sorted(split.train.names + split.val.names) == [
        "a/1.JPG",
        "a/2.Png",
        "a/deep/5.jpeg",
        "b/1.webp",
        "b/2.TIFF",
    ]


def test_decomposed_and_composed_names_are_one_class(tmp_path):
    flat(tmp_path / "train", **{unicodedata.normalize("NFC", "é"): 2, "b": 2})
    flat(tmp_path / "val", **{unicodedata.normalize("NFD", "é"): 1, "b": 1})
    split = read(tmp_path)
    assert split.class_names == ("b", "é")
    assert split.val.labels == (0, 1)
    flat(tmp_path / "train", **{unicodedata.normalize("NFD", "é"): 2})
    with pytest.raises(DataError, match="another Unicode form"):
        read(tmp_path)


def test_name_that_is_no_utf8_is_refused(tmp_path):
    flat(tmp_path, **{"b\udcff": 2, "a": 2})
    with pytest.raises(DataError, match="not UTF-8"):
        read(tmp_path)
