"""Stock timm's files and state_dicts load into a swapped model by the ways that timm and torch have for it."""

from collections import OrderedDict
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from timm.models import clean_state_dict, load_checkpoint
from torch import Tensor, nn

import zoo
from tests.zoo.families import FAMILIES, SLOW, TOLERANCES, VARIANTS, build_images, build_pair, build_stock

pytestmark = pytest.mark.parametrize("variant", VARIANTS)
having = partial(pytest.mark.parametrize, "family")
every_family = having([pytest.param(f, marks=pytest.mark.slow) if f in SLOW else f for f in FAMILIES])


def build_other(family: str) -> nn.Module:
    """Return a stock model of other weights."""
    other = build_stock(family, noise=0.05)
    assert not torch.equal(other(build_images(family)), build_stock(family)(build_images(family)))
    return other


def check_loaded(family: str, ours: nn.Module, other: nn.Module) -> None:
    images, allowed = build_images(family), TOLERANCES.get(family, 0.0)
    torch.testing.assert_close(ours(images), other(images), rtol=0, atol=allowed)


@every_family
@pytest.mark.parametrize("assign", [False, True])
def test_a_stock_state_dict_loads_strictly(family: str, variant: str, assign: bool) -> None:
    ours, other = build_pair(family, variant)[0], build_other(family)
    ours.load_state_dict(other.state_dict(), strict=True, assign=assign)
    check_loaded(family, ours, other)
    for name, parameter in ours.named_parameters():
        assert parameter.is_contiguous(), name


@having(["vit", "eva", "levit"])
def test_a_state_dict_of_a_wrapper_loads_below_its_prefix(family: str, variant: str) -> None:
    other = build_other(family)
    wrapped = OrderedDict((f"module.{name}", tensor) for name, tensor in other.state_dict().items())
    ours = build_pair(family, variant)[0]
    nn.ModuleDict({"module": ours}).load_state_dict(wrapped, strict=True)
    check_loaded(family, ours, other)
    again = build_pair(family, variant)[0]
    again.load_state_dict(clean_state_dict(wrapped), strict=True)
    check_loaded(family, again, other)


@having(["vit", "eva", "swin_v2"])
def test_a_swapped_models_own_state_comes_back_below_a_prefix(family: str, variant: str) -> None:
    ours, stock = build_pair(family, variant)
    state = nn.ModuleDict({"a": ours}).state_dict()
    assert not any(name.endswith("attn.qkv.weight") for name in state)
    other = build_other(family)
    zoo.swap_attention(other, variant)
    nn.ModuleDict({"a": other}).load_state_dict(state, strict=True)
    check_loaded(family, other, stock)


@every_family
def test_timms_load_checkpoint_reads_a_stock_file(family: str, variant: str, tmp_path: Path) -> None:
    ours, other = build_pair(family, variant)[0], build_other(family)
    save_file({name: tensor.contiguous() for name, tensor in other.state_dict().items()}, tmp_path / "a.safetensors")
    load_checkpoint(ours, str(tmp_path / "a.safetensors"), strict=True)
    check_loaded(family, ours, other)


def write_jax(path: Path, depth: int = 2, dim: int = 32, heads: int = 2) -> None:
    """Write random weights of a tiny ViT in the layout of Google's JAX checkpoints, heads apart."""
    draws = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return draws.normal(0, 0.05, shape).astype(np.float32)

    arrays = {
        "embedding/kernel": draw(8, 8, 3, dim),
        "embedding/bias": draw(dim),
        "cls": draw(1, 1, dim),
        "Transformer/posembed_input/pos_embedding": draw(1, 17, dim),
        "Transformer/encoder_norm/scale": draw(dim),
        "Transformer/encoder_norm/bias": draw(dim),
        "head/kernel": draw(dim, 3),
        "head/bias": draw(3),
    }
    for index in range(depth):
        block = f"Transformer/encoderblock_{index}"
        attention = f"{block}/MultiHeadDotProductAttention_1"
        for name in ("query", "key", "value"):
            arrays[f"{attention}/{name}/kernel"] = draw(dim, heads, dim // heads)
            arrays[f"{attention}/{name}/bias"] = draw(heads, dim // heads)
        arrays[f"{attention}/out/kernel"], arrays[f"{attention}/out/bias"] = draw(heads, dim // heads, dim), draw(dim)
        for norm in ("LayerNorm_0", "LayerNorm_2"):
            arrays[f"{block}/{norm}/scale"], arrays[f"{block}/{norm}/bias"] = draw(dim), draw(dim)
        for layer, (in_, out) in enumerate(((dim, 4 * dim), (4 * dim, dim))):
            arrays[f"{block}/MlpBlock_3/Dense_{layer}/kernel"] = draw(in_, out)
            arrays[f"{block}/MlpBlock_3/Dense_{layer}/bias"] = draw(out)
    np.savez(path, **arrays)  # type: ignore[arg-type]


@pytest.mark.parametrize("through", ["load_pretrained", "load_checkpoint"])
def test_timms_loader_of_jax_weights_writes_into_the_parts(variant: str, through: str, tmp_path: Path) -> None:
    write_jax(tmp_path / "vit.npz")
    ours, stock = build_pair("vit", variant)
    before = ours(build_images("vit"))
    for model in (ours, stock):
        if through == "load_pretrained":
            model.load_pretrained(str(tmp_path / "vit.npz"))  # type: ignore[operator]
        else:
            load_checkpoint(model, str(tmp_path / "vit.npz"))
    check_loaded("vit", ours, stock)
    assert not torch.equal(ours(build_images("vit")), before)
    queries = np.load(tmp_path / "vit.npz")["Transformer/encoderblock_1/MultiHeadDotProductAttention_1/query/kernel"]
    got = zoo.attention_weights(ours)["blocks.1.attn"]["q"]
    assert torch.equal(got, torch.from_numpy(queries).flatten(1).t())


@having(["vit", "eva"])
@pytest.mark.parametrize("strict", [True, False])
def test_a_missing_fused_weight_is_named(family: str, variant: str, strict: bool) -> None:
    ours, state = build_pair(family, variant)[0], dict(build_other(family).state_dict())
    del state["blocks.0.attn.qkv.weight"]
    parts = [f"blocks.0.attn.qkv.to_{part}{'.weight' if variant == 'separate' else ''}" for part in "qkv"]
    if strict:
        with pytest.raises(RuntimeError, match=rf"Missing key.*{parts[0]}"):
            ours.load_state_dict(state)
        return
    assert ours.load_state_dict(state, strict=False).missing_keys == parts


def test_state_dict_holds_no_tensor_twice(variant: str) -> None:
    ours, _ = build_pair("vit", variant)
    tensors: list[Tensor] = list(ours.state_dict().values())
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)
