"""A block that runs MLP and attention at once keeps its first MLP layer when a scheme draws its attention."""

import timm
import torch

import zoo


def test_a_scheme_leaves_the_mlps_part_of_a_fused_weight(variant: str) -> None:
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_base_patch16_xp_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=3
    )
    before = model.blocks[1].in_proj.weight.detach().clone()
    zoo.swap_attention(model, variant, init="normal", seed=0)
    after = model.blocks[1].in_proj.weight.detach()
    hidden = before.shape[0] - 3 * 32
    assert torch.equal(after[:hidden], before[:hidden])
    assert 0.9 < float(after[hidden:].std()) < 1.1
