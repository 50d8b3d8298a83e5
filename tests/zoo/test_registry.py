import pytest
from torch import nn

import zoo
from zoo.errors import UnknownNameError
from zoo.registry import find_attention


@pytest.mark.usefixtures("own_registry")
def test_a_registered_class_is_found_under_its_name() -> None:
    @zoo.register_attention("mine")
    class Mine(nn.Module):
        pass

    assert find_attention("mine") is Mine
    assert zoo.list_attentions() == ("linear", "mine", "parameter", "separate")


def test_the_fixture_took_the_test_variant_away() -> None:
    assert zoo.list_attentions() == ("linear", "parameter", "separate")


@pytest.mark.usefixtures("own_registry")
def test_a_name_is_given_once() -> None:
    before = find_attention("separate")
    with pytest.raises(ValueError, match="attention 'separate' is already SeparateProjection"):
        zoo.register_attention("separate")(nn.Linear)
    assert find_attention("separate") is before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("seperate", "unknown attention 'seperate', did you mean 'separate'"),
        ("xyz", "unknown attention 'xyz'; known are linear, parameter, separate"),
    ],
)
def test_an_unknown_name_gives_the_nearest_or_all(name: str, message: str) -> None:
    with pytest.raises(UnknownNameError, match=message):
        find_attention(name)
