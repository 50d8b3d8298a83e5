import numpy as np
import pytest
import torch
from PIL import Image

from train.augment import build_augmentation
from train.config import AugmentConfig
from train.draws import own_draws, seed_draws
from train.errors import ConfigError
from zoo.card import Preprocessing
from zoo.preprocess import transform_image

PREPROCESSING = Preprocessing(size=(12, 12), crop_pct=0.8, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
STILL = {"crop": "shift", "hflip": 0.0}


@pytest.fixture(scope="module")
def image():
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 24, 3), dtype=np.uint8))


def augment(image, seed=0, preprocessing=PREPROCESSING, **options):
    function = build_augmentation(AugmentConfig(**options), preprocessing)
    with own_draws():
        seed_draws(seed)
        return function(image)


@pytest.mark.parametrize("crop_mode", ["center", "squash", "border"])
def test_shift_of_nothing_is_evaluations_input_bit_for_bit(image, crop_mode):
    preprocessing = PREPROCESSING.model_copy(update={"crop_mode": crop_mode})
    x = augment(image, preprocessing=preprocessing, **STILL)
    np.testing.assert_array_equal(x.numpy(), transform_image(image, preprocessing))


def test_shift_moves_by_up_to_its_pixels_and_repeats_edges(image):
    still = augment(image, **STILL)
    padded = torch.nn.functional.pad(still, (1, 1, 1, 1), mode="replicate")
    moves = {(dy, dx): padded[:, dy : dy + 12, dx : dx + 12] for dy in range(3) for dx in range(3)}
    seen = set()
    for seed in range(60):
        x = augment(image, seed, shift_px=1, **STILL)
        seen |= {move for move, expected in moves.items() if torch.equal(x, expected)}
    assert seen == set(moves)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"color_jitter": 0.4, **STILL},
        {"auto_augment": "rand-m9-mstd0.5-inc1", **STILL},
        {"auto_augment": "augmix-m3-w3", **STILL},
        {"erase_probability": 1.0, **STILL},
        {"crop": "shift", "hflip": 1.0},
    ],
    ids=str,
)
def test_each_option_changes_the_image_and_repeats_for_its_seed(image, options):
    x = augment(image, 1, **options)
    assert (x.shape, x.dtype) == ((3, 12, 12), torch.float32)
    assert torch.equal(augment(image, 1, **options), x)
    still = augment(image, **STILL)
    assert any(not torch.equal(augment(image, seed, **options), still) for seed in range(4))


def test_flip_is_a_mirror_and_zero_is_none(image):
    still = augment(image, **STILL)
    torch.testing.assert_close(augment(image, crop="shift", hflip=1.0), still.flip(-1), rtol=0, atol=0)


def test_random_resized_crop_is_on_the_backbones_scale():
    x = augment(Image.new("RGB", (40, 40), (255, 0, 0)), scale=(0.5, 1.0))
    for channel, (value, mean, std) in enumerate(
        zip((1.0, 0.0, 0.0), PREPROCESSING.mean, PREPROCESSING.std, strict=True)
    ):
        torch.testing.assert_close(x[channel], torch.full((12, 12), (value - mean) / std))


@pytest.mark.parametrize("policy", ["foo", "rand-x9", "augmix-z3"])
def test_unknown_policy_is_one_clear_line(policy):
    with pytest.raises(ConfigError, match=r"augment\.auto_augment: got '" + policy) as caught:
        build_augmentation(AugmentConfig(auto_augment=policy), PREPROCESSING)
    assert "\n" not in str(caught.value)
