"""Parts that somebody parametrized, pruned, hooked or replaced still make the projection; the whole is no part."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import zoo
from tests.zoo.families import VARIANTS, build_images, build_pair
from zoo.errors import ZooError
from zoo.projections import Projection

pytestmark = pytest.mark.parametrize("variant", VARIANTS)


def name_part(variant: str) -> tuple[str, str]:
    """Return the submodule and the leaf that hold the queries of the first block."""
    return ("blocks.0.attn.qkv.to_q", "weight") if variant == "separate" else ("blocks.0.attn.qkv", "to_q")


OLD_NORM = pytest.mark.filterwarnings("ignore:.torch.nn.utils.weight_norm. is deprecated:FutureWarning")
CHANGES = {
    "weight_norm": (parametrizations.weight_norm, parametrize.remove_parametrizations),
    "orthogonal": (parametrizations.orthogonal, parametrize.remove_parametrizations),
    "prune": (partial(prune.l1_unstructured, amount=0.5), prune.remove),
    "old_weight_norm": (nn.utils.weight_norm, nn.utils.remove_weight_norm),
}


@OLD_NORM
@pytest.mark.parametrize("how", CHANGES)
def test_a_part_that_is_parametrized_or_pruned_follows_its_parameters(variant: str, how: str) -> None:
    ours, stock = build_pair("vit", variant)
    images, fused = build_images("vit"), stock.get_parameter("blocks.0.attn.qkv.weight")
    owner, leaf = name_part(variant)
    module = ours.get_submodule(owner)
    apply, remove = CHANGES[how]
    apply(module, leaf)  # type: ignore[operator]
    before = ours(images)
    before.square().sum().backward()
    own = {
        name: parameter for name, parameter in ours.named_parameters() if "blocks.0.attn.qkv" in name and "to_q" in name
    }
    changed = [parameter for name, parameter in own.items() if "orig" in name or name.endswith("_v")]
    assert len(changed) == (2 if how == "weight_norm" else 1)  # magnitude and direction
    for parameter in changed:
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 0
        with torch.no_grad():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    got = ours(images)
    assert not torch.equal(got, before)
    computed = getattr(module, leaf).detach()
    with torch.no_grad():
        fused[:32] = computed if variant == "separate" else computed.t()
    torch.testing.assert_close(got, stock(images), rtol=0, atol=1e-6)  # with hooks inside, three products and not one
    with pytest.raises(ZooError, match=r"^(blocks\.0\.attn\.qkv|to_q)"):
        zoo.restore_attention(ours)
    remove(module, leaf)  # type: ignore[operator]
    zoo.restore_attention(ours)
    torch.testing.assert_close(ours(images), stock(images), rtol=0, atol=1e-6)


@OLD_NORM
def test_a_joined_weight_cannot_be_parametrized(variant: str) -> None:
    ours, stock = build_pair("vit", variant)
    module = ours.get_submodule("blocks.0.attn.qkv")
    for apply, _ in CHANGES.values():
        with pytest.raises((ValueError, KeyError, TypeError), match="weight"):
            apply(module, "weight")  # type: ignore[operator]
    assert torch.equal(ours(build_images("vit")), stock(build_images("vit")))


def test_sync_batchnorm_conversion_leaves_projections(variant: str) -> None:
    for family in ("hybrid", "levit"):
        ours, _ = build_pair(family, variant)
        before = [name for name, module in ours.named_modules() if isinstance(module, Projection)]
        converted = nn.SyncBatchNorm.convert_sync_batchnorm(ours)
        assert before == [name for name, module in converted.named_modules() if isinstance(module, Projection)]
        assert len(before) >= 2


def test_hooks_see_a_projection_as_one_layer_and_its_layers_where_there_are_any(variant: str) -> None:
    ours, stock = build_pair("vit", variant)
    seen: dict[str, list[torch.Size]] = {}
    owners = ["qkv", "qkv.to_q", "qkv.to_v"] if variant == "separate" else ["qkv"]
    for owner in owners:
        module = ours.get_submodule(f"blocks.0.attn.{owner}")
        module.register_forward_hook(
            lambda _, __, output, owner=owner: seen.setdefault(owner, []).append(output.shape)  # type: ignore[misc]
        )
    torch.testing.assert_close(ours(build_images("vit")), stock(build_images("vit")), rtol=0, atol=1e-6)
    assert seen == {owner: [torch.Size([2, 17, 96 if owner == "qkv" else 32])] for owner in owners}


def test_a_layer_that_replaces_a_part_is_called(variant: str) -> None:
    class Doubled(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base

        def forward(self, x: Tensor) -> Tensor:
            return 2 * self.base(x)  # type: ignore[no-any-return]

    ours, stock = build_pair("vit", variant)
    where, start = ("qkv.to_v", 64) if variant == "separate" else ("qkv", 0)  # raw matrices are no layers
    owner, _, leaf = f"blocks.0.attn.{where}".rpartition(".")
    setattr(ours.get_submodule(owner), leaf, Doubled(ours.get_submodule(f"{owner}.{leaf}")))
    with torch.no_grad():
        stock.get_parameter("blocks.0.attn.qkv.weight")[start:].mul_(2)
        stock.get_parameter("blocks.0.attn.qkv.bias")[start:].mul_(2)
    torch.testing.assert_close(ours(build_images("vit")), stock(build_images("vit")), rtol=0, atol=1e-6)
