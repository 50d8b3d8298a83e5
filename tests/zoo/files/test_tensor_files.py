import json
import os
import pickle
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from zoo.errors import BundleError
from zoo.files.tensor_files import (
    check_finite,
    find_misfits,
    list_names,
    read_tensors,
    read_tied,
    same_bits,
    write_tensors,
)


def tied_state() -> dict[str, Tensor]:
    weight = torch.arange(6.0).reshape(2, 3)
    return {"a": weight, "b": torch.ones(2), "c": weight}


@pytest.mark.parametrize("every_name", [False, True])
def test_ties_come_back_as_one_tensor_however_they_are_stored(tmp_path: Path, every_name: bool) -> None:
    file = tmp_path / "x.safetensors"
    assert write_tensors(file, tied_state(), every_name=every_name) == {"c": "a"}
    with safe_open(file, framework="pt") as opened:
        assert sorted(opened.keys()) == (["a", "b", "c"] if every_name else ["a", "b"])
    tensors, ties = read_tied(file)
    assert ties == {"c": "a"}
    assert tensors["c"] is tensors["a"]
    assert all(torch.equal(tensors[name], tensor) for name, tensor in tied_state().items())


@pytest.mark.parametrize(
    ("ties", "message"),
    [
        ("[", "list of tied tensors is damaged"),
        ("[1]", "list of tied tensors is damaged"),
        ('{"c": 1}', "1 is unknown"),
        ('{"c": "nope"}', "'nope' is unknown"),
        ('{"c": "d", "d": "a"}', "'d' is unknown"),
        ('{"b": "a"}', "b and a differ"),
        ('{"b": "b"}', "'b' is unknown"),  # a name that is tied further cannot be the first
        ("[" * 100_000, "list of tied tensors is damaged"),
    ],
)
def test_ties_that_do_not_fit_the_tensors_are_named(tmp_path: Path, ties: str, message: str) -> None:
    save_file({"a": torch.ones(3), "b": torch.zeros(3)}, tmp_path / "x.safetensors", metadata={"ties": ties})
    with pytest.raises(BundleError, match=f"x.safetensors: its list .*{message}|x.safetensors: .*{message}"):
        read_tied(tmp_path / "x.safetensors")


def header(length: int, text: bytes = b"{}") -> bytes:
    return length.to_bytes(8, "little") + text


def header_that_promises(nbytes: int) -> bytes:
    text = json.dumps({"w": {"dtype": "F32", "shape": [nbytes // 4], "data_offsets": [0, nbytes]}}).encode()
    return header(len(text), text)


def symlink_loop(file: Path) -> None:
    file.symlink_to(file.with_name("other"))
    file.with_name("other").symlink_to(file)


DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (Path.exists, "missing"),
    (lambda f: f.mkdir(), "a directory, a safetensors file is wanted"),
    (lambda f: os.mkfifo(f), "no regular file"),  # opening it would wait for ever
    (symlink_loop, r"cannot be read \(Too many levels of symbolic links\)"),
    (lambda f: f.symlink_to("nowhere"), "missing"),
    (lambda f: f.write_bytes(b""), r"truncated \(0 bytes\)"),
    (lambda f: f.write_bytes(b"\x00" * 7), "truncated, or not safetensors"),
    (lambda f: f.write_bytes(header(2**63)), "truncated, or not safetensors"),
    (lambda f: f.write_bytes(header(90_000_000)), "truncated, or not safetensors"),
    (lambda f: f.write_bytes(header_that_promises(2**50)), "truncated, or not safetensors"),
    (lambda f: f.write_bytes(header(200_000, b"[" * 200_000)), "truncated, or not safetensors"),
    (lambda f: f.write_bytes(header(4, b"\xff\xfe{}")), "truncated, or not safetensors"),
    (lambda f: f.write_bytes(pickle.dumps({"a": 1})), "a pickle, not safetensors; weights of another format are never"),
    (lambda f: torch.save({"a": torch.ones(1)}, f), "a pickle, not safetensors"),
    (lambda f: f.write_text("<html>"), "truncated, or not safetensors"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_what_is_no_safetensors_file_is_named_and_costs_no_memory(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    file = tmp_path / "x.safetensors"
    damage(file)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BundleError, match=rf"x\.safetensors: {message}") as caught:
        read_tensors(file)
    assert "\n" not in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB: less than a header promises


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    write_tensors(file, tied_state())
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(BundleError, match="truncated"):
            read_tensors(file)


def test_misfits_are_all_named() -> None:
    got = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2).half(), "d": torch.ones(2).long()}
    wanted = {name: torch.ones(size, device="meta") for name, size in (("b", 3), ("c", 2), ("d", 2), ("e", 2))}
    faults = ["a is not the model's", "b: got (2,) float32, wanted (3,) float32"]
    rest = ["d: got (2,) int64, wanted (2,) float32", "e is missing"]
    assert find_misfits(got, wanted) == [*faults, "c: got (2,) float16, wanted (2,) float32", *rest]
    assert find_misfits(got, wanted, exact=False) == [*faults, *rest]
    assert find_misfits(got, got) == []


def test_nan_and_inf_are_named(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(2), "b": torch.tensor([1.0, float("nan")]), "n": torch.ones(1).long()}
    with pytest.raises(BundleError, match="b holds NaN or Inf"):
        check_finite(tmp_path, tensors)
    with pytest.raises(BundleError, match="b, c hold NaN or Inf"):
        check_finite(tmp_path, tensors | {"c": torch.tensor(float("-inf"))})
    check_finite(tmp_path, {"a": tensors["a"], "n": tensors["n"]})


def test_names_are_counted_beyond_the_first() -> None:
    assert list_names("abc") == "a, b, c"
    assert list_names("abcdefg", separator="; ") == "a; b; c; d; e; and 2 more"


def test_bits_are_compared_and_not_numbers() -> None:
    nan = torch.tensor([float("nan"), 0.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(nan, torch.tensor([float("nan"), -0.0]))
    assert not same_bits(nan, nan.double())
    assert not same_bits(torch.ones(2, 1), torch.ones(2))
    assert same_bits(torch.ones(2, 3).t(), torch.ones(3, 2))
    assert same_bits(torch.tensor(1.0), torch.tensor(1.0))
