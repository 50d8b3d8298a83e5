import io
import json
import logging
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from train.config import AugmentConfig, DataConfig
from train.data import build_data, read_split, resolve_preprocessing
from train.errors import ConfigError, DataError
from train.sampler import Draw
from zoo.card import Preprocessing
from zoo.preprocess import preprocess

PREPROCESSING = Preprocessing(size=(8, 8), crop_pct=0.9, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


def encode(image, kind="PNG"):
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def noise(side=10, mode="RGB"):
    return Image.effect_noise((side, side), 90).convert(mode)


@pytest.fixture
def root(tmp_path):
    for label in "abc":
        (tmp_path / label).mkdir()
        for i in range(4):
            (tmp_path / label / f"{i}.png").write_bytes(encode(noise()))
    return tmp_path


def build(root, seed=0, augment=None, **options):
    return build_data(DataConfig(root=str(root), **options), augment or AugmentConfig(), PREPROCESSING, seed)


def test_validation_goes_through_the_function_that_serves(root):
    data = build(root)
    for i in range(len(data.val)):
        x, label = data.val[i]
        np.testing.assert_array_equal(x.numpy(), preprocess(data.val.images.read(i), PREPROCESSING))
        assert data.class_names[label] == data.val.images.names[i][0]


def test_overrides_reach_both_sets_and_the_card():
    config = DataConfig(root="builtin:digits", crop_pct=1.0, interpolation="bilinear", mean=(0.1, 0.2, 0.3))
    data = build_data(config, AugmentConfig(crop="shift", hflip=0.0), PREPROCESSING, 0)
    expected = Preprocessing(
        size=(8, 8), crop_pct=1.0, interpolation="bilinear", mean=(0.1, 0.2, 0.3), std=(0.5, 0.5, 0.5)
    )
    assert data.preprocessing == resolve_preprocessing(config, PREPROCESSING) == expected
    np.testing.assert_array_equal(data.val[0][0].numpy(), preprocess(data.val.images.read(0), expected))
    np.testing.assert_array_equal(data.train[Draw(0, 0)][0].numpy(), preprocess(data.train.images.read(0), expected))


def test_augmentation_off_trains_on_evaluations_input(root):
    data = build(root, augment=AugmentConfig(enabled=False))
    np.testing.assert_array_equal(
        data.train[Draw(3, 1)][0].numpy(), preprocess(data.train.images.read(1), PREPROCESSING)
    )


def test_augmentation_depends_on_seed_epoch_and_image_alone(root):
    x = build(root).train[Draw(2, 1)][0]
    again = build(root)
    again.train.__getitems__([Draw(0, 0), Draw(2, 3)])  # what was drawn before does not matter
    torch.manual_seed(99)
    assert torch.equal(again.train[Draw(2, 1)][0], x)
    assert torch.equal(again.train.__getitems__([Draw(2, 0), Draw(2, 1)])[1][0], x)
    assert not torch.equal(again.train[Draw(3, 1)][0], x)
    assert not torch.equal(build(root, seed=1).train[Draw(2, 1)][0], x)


def test_augmentation_leaves_dropouts_stream_alone(root):
    data = build(root, augment=AugmentConfig(color_jitter=0.4, erase_probability=1.0))
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    expected = torch.rand(2), random.random(), np.random.rand()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    data.train.__getitems__([Draw(0, 0), Draw(0, 1)])
    assert torch.equal(torch.rand(2), expected[0])
    assert (random.random(), np.random.rand()) == expected[1:]


def test_same_picture_twice_in_a_batch_of_two_ranks_is_augmented_apart(tmp_path):
    picture = encode(noise())
    for label in "ab":
        (tmp_path / label).mkdir()
        for i in range(8):
            (tmp_path / label / f"{i}.png").write_bytes(picture)
    data = build(tmp_path)
    inputs = [data.train[Draw(0, i)][0] for i in range(len(data.train))]
    assert len({x.numpy().tobytes() for x in inputs}) == len(inputs)


def test_val_fingerprint_is_of_images_and_classes_not_of_preprocessing(root):
    data = build(root)
    assert (
        build(root, seed=5, crop_pct=0.5, augment=AugmentConfig(enabled=False)).val_fingerprint == data.val_fingerprint
    )
    assert build(root, split_seed=1).val_fingerprint != data.val_fingerprint
    assert data.val_fingerprint != data.train_fingerprint
    path = data.val.images.contents[0]
    pixels = np.asarray(Image.open(path)).copy()
    pixels[0, 0, 0] ^= 1
    path.write_bytes(encode(Image.fromarray(pixels)))
    assert build(root).val_fingerprint != data.val_fingerprint


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1", "I;16"])
def test_every_pixel_mode_trains_and_scores_as_three_channels(root, mode):
    image = Image.fromarray(np.arange(100, dtype=np.uint16).reshape(10, 10)) if mode == "I;16" else noise(mode=mode)
    kind = "TIFF" if mode == "CMYK" else "PNG"
    for path in sorted(root.glob("a/*.png")):
        path.unlink()
        path.with_suffix(f".{kind.lower()}").write_bytes(encode(image, kind))
    data = build(root)
    assert data.train.images.labels[0] == data.val.images.labels[0] == 0
    assert data.train[Draw(0, 0)][0].shape == data.val[0][0].shape == (3, 8, 8)


def test_broken_images_stop_or_are_left_out_by_policy(root, caplog):
    (root / "a" / "0.png").write_bytes(b"")
    (root / "b" / "page.jpg").write_text("<html>")
    whole = encode(noise(64), "JPEG")
    (root / "c" / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"cannot be read: .*--data\.on_bad_image skip"):
        build(root)
    with caplog.at_level(logging.WARNING):
        data = build(root, on_bad_image="skip")
    assert "left out 3 of 14 images" in caplog.text
    assert all(name in caplog.text for name in ("0.png", "page.jpg", "cut.jpg"))
    assert len(data.train) + len(data.val) == 11


def test_class_without_a_sound_image_is_named(root):
    for path in root.glob("b/*.png"):
        path.write_bytes(b"")
    with pytest.raises(DataError, match="class 'b' has no sound training image left"):
        build(root, on_bad_image="skip")


def test_image_cut_short_is_named_at_use(root):
    whole = encode(noise(64), "JPEG")
    for i in range(2):
        (root / "a" / f"cut{i}.jpg").write_bytes(whole[: len(whole) // 2])
    data = build(root)
    for dataset, key_of in ((data.train, lambda i: Draw(0, i)), (data.val, lambda i: i)):
        cut = [i for i, name in enumerate(dataset.images.names) if "cut" in name]
        for index in cut:
            with pytest.raises(DataError, match=r"a/cut\d\.jpg: the image is damaged"):
                dataset[key_of(index)]
        assert all(dataset[key_of(i)] for i in range(len(dataset)) if i not in cut)


def test_unknown_builtin_names_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown data set 'builtin:digit', did you mean 'builtin:digits'"):
        read_split(DataConfig(root="builtin:digit"))


def test_split_that_was_read_before_is_used(root):
    config = DataConfig(root=str(root))
    split = read_split(config)
    data = build_data(config, AugmentConfig(), PREPROCESSING, 0, split=split)
    assert data.train.images is split.train
    assert data.class_names is split.class_names


@pytest.mark.slow
def test_class_names_outside_ascii_survive_lang_c(tmp_path):
    for label in ("日本 語", "é"):
        (tmp_path / label).mkdir()
        for i in range(2):
            (tmp_path / label / f"写真{i}.png").write_bytes(encode(noise()))
    code = (
        "import json, sys; from train.config import *; from train.data import *\n"
        "split = read_split(DataConfig(root=sys.argv[1])); print(json.dumps([split.class_names, split.val.names]))\n"
        "data = build_data(DataConfig(root=sys.argv[1]), AugmentConfig(), "
        "Preprocessing(size=(8, 8), mean=(0.5,) * 3, std=(0.5,) * 3), 0)\n"
        "print(data.val_fingerprint); print(data.class_names[1])"
    )
    environment = {**os.environ, "LANG": "C", "LC_ALL": "C"}
    out = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, check=True
    ).stdout.decode("utf-8")
    lines = out.splitlines()
    assert json.loads(lines[0])[0] == ["é", "日本 語"]
    assert lines[1] == build(tmp_path).val_fingerprint
    assert lines[2] == "日本 語"
