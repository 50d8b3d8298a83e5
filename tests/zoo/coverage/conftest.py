"""Small timm models of every attention class and configuration that zoo.timm_map has a row for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import timm
import torch
from timm.layers import ClassifierHead
from timm.layers.attention import Attention
from timm.models import gcvit, metaformer, mvitv2, nest, nextvit, volo
from torch import Tensor, nn

from zoo.projections import KINDS, Projection
from zoo.slots import find_places, iter_attentions

Edit = Callable[[nn.Module], object]
BuildForm = Callable[..., nn.Module]


@dataclass(frozen=True)
class Form:
    """A small model of an attention configuration.

    Attributes:
        backbone: timm's name for it, or what builds it where timm's factory fixes the sizes.
        kwargs: What makes it small and what makes it of this form.
        edit: What is changed after it is built, because no argument gives it.
        size: Side of its images in pixels.
        call: What the model is called with beside the images.
    """

    backbone: str | Callable[..., nn.Module]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    edit: Edit = lambda _: None
    size: int = 32
    call: Mapping[str, Any] = field(default_factory=dict)


def _each_attention(change: Edit) -> Edit:
    return lambda model: [change(attention) for _, attention in iter_attentions(model)]


def _set(**values: object) -> Edit:
    return _each_attention(lambda attention: [setattr(attention, name, value) for name, value in values.items()])


def _widen(model: nn.Module) -> None:
    for block in model.blocks:
        block.attn = Attention(32, 2, attn_head_dim=24, qkv_bias=True, gated=True)


def _clamp(model: nn.Module) -> None:
    for name, limit in model.named_buffers():
        if name.endswith(("_min", "_max")):
            limit.fill_(-0.3 if name.endswith("_min") else 0.3)


def _build_next_vit(*, sr_ratio: int, num_classes: int) -> nn.Module:
    """Build a block of NextViT's that has attention; timm fixes the widths of the whole, and they are large."""
    block = nextvit.NextTransformerBlock(64, 128, drop_path=0.0, sr_ratio=sr_ratio, mix_block_ratio=0.5)
    return nn.Sequential(nn.Conv2d(3, 64, 8, 8), block, ClassifierHead(128, num_classes))


_VIT: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
_FOUR: dict[str, Any] = {"depths": (1, 1, 1, 1)}
_DAVIT = _FOUR | {"embed_dims": (16,) * 4, "num_heads": (2,) * 4, "window_size": 2}
_PYRAMID = _FOUR | {"embed_dims": (16, 16, 16, 32), "num_heads": (1, 2, 2, 2)}
_SWIN = {"img_size": 32, "embed_dim": 32, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4}
_LEVIT = {"img_size": 128, "embed_dim": (16, 24, 32), "key_dim": 8, "num_heads": (2, 4, 2), "depth": (1, 1, 1)}
_MAXVIT = _FOUR | {"img_size": 64, "embed_dim": (16, 16, 16, 32), "stem_width": 8}
_MAXVIT |= {"transformer_dim_head": 8, "transformer_window_size": (2, 2)}
_MVIT = {"depths": (1, 1, 1), "embed_dim": 16, "num_heads": 1}
_COAT = {"img_size": 64, "serial_depths": (1, 1, 1, 1), "crpe_window": {3: 2}, "num_heads": 2}
_MIXERS = [metaformer.Pooling] * 2 + [metaformer.Attention] * 2
_NORMS = [metaformer.LayerNorm2dNoBias] * 2 + [metaformer.LayerNormNoBias] * 2
_CAUSAL, _MASK = {"is_causal": True}, {"attn_mask": torch.ones(17, 17).tril(3).bool()}

FORMS: dict[str, Form] = {
    "vit": Form("vit_tiny_patch16_224", _VIT),
    "vit_no_bias_norms": Form("vit_tiny_patch16_224", _VIT | {"qkv_bias": False, "qk_norm": True}),
    "vit_wide_gated": Form("vit_tiny_patch16_224", _VIT, _widen),
    "vit_unfused": Form("vit_tiny_patch16_224", _VIT, _set(fused_attn=False)),
    "vit_mask": Form("vit_tiny_patch16_224", _VIT, call=_MASK),
    "vit_causal": Form("vit_tiny_patch16_224", _VIT, call=_CAUSAL),
    "distilled": Form("deit_tiny_distilled_patch16_224", _VIT),
    "registers": Form("vit_small_patch14_reg4_dinov2", _VIT),
    "siglip": Form("vit_base_patch16_siglip_224", _VIT),
    "clip": Form("vit_base_patch16_clip_quickgelu_224", _VIT),
    "beit3": Form("beit3_base_patch16_224", _VIT),
    "aimv2": Form("aimv2_large_patch14_224", _VIT),
    "hybrid": Form("vit_tiny_r_s16_p8_224", _VIT | {"patch_size": 1}),
    "parallel_things": Form("vit_small_patch16_18x2_224", _VIT),
    "pit": Form("pit_ti_224", {"img_size": 48, "base_dims": (8,) * 3, "depth": (1,) * 3, "heads": (2,) * 3}, size=48),
    "naflex": Form("naflexvit_base_patch16_gap", {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}),
    "naflex_rope": Form("naflexvit_base_patch16_gap", _VIT | {"rope_type": "axial"}),
    "csatv2": Form(
        "csatv2", {"dims": (8, 16, 24, 32), "depths": (1, 1, 2, 2), "transformer_depths": (0, 0, 1, 1)}, size=128
    ),
    "scaling": Form("vit_pwee_patch16_reg1_gap_256", _VIT),
    "scaling_no_bias": Form("vit_base_patch16_xp_224", _VIT),
    "scaling_unfused": Form("vit_pwee_patch16_reg1_gap_256", _VIT, _set(fused_attn=False)),
    "scaling_diff": Form("vit_dpwee_patch16_reg1_gap_256", _VIT),
    "diff": Form("vit_dwee_patch16_reg1_gap_256", _VIT),
    "diff_unfused": Form("vit_dwee_patch16_reg1_gap_256", _VIT, _set(fused_attn=False)),
    "rope": Form("vit_small_patch16_rope_ape_224", _VIT),
    "rope_mixed": Form("vit_small_patch16_rope_mixed_224", _VIT),
    "rope_half": Form("deepseek_vit_412m", _VIT),
    "rope_unfused": Form(
        "vit_base_patch16_sapiens2", _VIT | {"num_heads": 4, "num_kv_heads": (4, 2)}, _set(fused_attn=False)
    ),
    "rope_mask": Form("vit_small_patch16_rope_ape_224", _VIT, call=_MASK),
    "eva": Form("eva_giant_patch14_224", _VIT),
    "eva_bias_apart": Form("eva_giant_patch14_224", _VIT, _set(qkv_bias_separate=True)),
    "eva_no_bias": Form("vit_small_patch16_dinov3", _VIT),
    "eva_rope_bias": Form("vit_small_patch16_dinov3_qkvb", _VIT),
    "eva_inner_norm": Form("eva02_base_patch16_clip_224", _VIT),
    "eva_mask": Form("eva02_base_patch14_224", _VIT, call=_MASK),
    "eva_causal_unfused": Form("eva02_base_patch14_224", _VIT, _set(fused_attn=False), call=_CAUSAL),
    "beit": Form("beit_base_patch16_224", _VIT),
    "beit_shared": Form("beit_base_patch16_224", _VIT | {"use_rel_pos_bias": False, "use_shared_rel_pos_bias": True}),
    "beit_no_bias": Form("beit_base_patch16_224", _VIT | {"qkv_bias": False}),
    "beit_bias_apart": Form("beit_base_patch16_224", _VIT, _set(qkv_bias_separate=True, fused_attn=False)),
    "relpos": Form("vit_relpos_small_patch16_224", _VIT),
    "relpos_table": Form("vit_relpos_small_patch16_224", _VIT | {"rel_pos_type": "bias", "qkv_bias": True}),
    "relpos_shared": Form("vit_srelpos_small_patch16_224", _VIT, _set(fused_attn=False)),
    "sam": Form("samvit_base_patch16_224", _VIT | {"window_size": 2, "global_attn_indexes": (1,), "neck_chans": 16}),
    "cait": Form("cait_xxs24_224", _VIT),
    "cait_unfused": Form("cait_xxs24_224", _VIT, _set(fused_attn=False)),
    "coat": Form("coat_tiny", _COAT | {"embed_dims": (16, 24, 24, 24), "parallel_depth": 1}, size=64),
    "coat_lite": Form("coat_lite_tiny", _COAT | {"embed_dims": (16, 16, 16, 24)}, size=64),
    "convit": Form("convit_tiny", _VIT | {"local_up_to_layer": 1}),
    "crossvit": Form(
        "crossvit_9_240",
        {"img_size": 24, "patch_size": (12, 16), "embed_dim": (16, 32), "depth": ((1, 1, 0),), "num_heads": (2, 2)},
        size=24,
    ),
    "davit": Form("davit_tiny", _DAVIT, size=64),
    "davit_unfused": Form("davit_tiny", _DAVIT, _set(fused_attn=False), size=64),
    "davit_florence": Form("davit_base_fl", _DAVIT, size=64),
    "edgenext": Form("edgenext_xx_small", _FOUR | {"dims": (8, 16, 24, 32), "heads": (2,) * 4}, size=64),
    "efficientformer": Form("efficientformer_l1", _FOUR | {"embed_dims": (8, 8, 8, 16), "num_vit": 1}, size=224),
    "fastvit": Form("fastvit_sa12", {"embed_dims": (32, 32, 32, 64), "layers": (1, 1, 1, 1)}, size=64),
    "gcvit": Form(
        gcvit.GlobalContextVit,
        {"img_size": 64, "embed_dim": 16, "depths": (1, 1, 2, 2), "num_heads": (1, 2, 2, 2)},
        size=64,
    ),
    "gemma4": Form(
        "gemma4_vit_167m",
        _VIT
        | {"num_heads": 4, "head_dim": 24, "num_kv_heads": 2, "intermediate_size": 64}
        | {"position_embedding_size": 16, "pooling_kernel_size": 1, "use_clipped_linears": True},
        _clamp,
    ),
    "hiera": Form(
        "hiera_tiny_224",
        {"img_size": 64, "embed_dim": 16, "stages": (1,) * 4, "num_heads": 2, "mask_unit_size": (4, 4), "q_pool": 2},
        size=64,
    ),
    "sam2": Form(
        "sam2_hiera_tiny",
        {"embed_dim": 16, "stages": (1, 1, 2, 1), "num_heads": 2, "global_att_blocks": (3,)}
        | {"window_spec": (4, 2, 2, 2), "global_pos_size": (4, 4)},
        size=64,
    ),
    "levit": Form("levit_128s", _LEVIT, size=128),
    "levit_pool": Form("levit_256d", _LEVIT, size=128),
    "maxvit": Form("maxvit_pico_rw_256", _MAXVIT, size=64),
    "maxvit_mlp": Form("maxvit_rmlp_pico_rw_256", _MAXVIT, size=64),
    "maxvit_tf": Form("maxvit_tiny_tf_224", _MAXVIT, size=64),
    "maxvit_unfused": Form("maxvit_pico_rw_256", _MAXVIT, _set(fused_attn=False), size=64),
    "metaformer": Form(
        metaformer.MetaFormer, _FOUR | {"dims": (8, 8, 32, 64), "token_mixers": _MIXERS, "norm_layers": _NORMS}, size=64
    ),
    "mvitv2": Form(mvitv2.MultiScaleVit, {"img_size": 32, "cfg": mvitv2.MultiScaleVitCfg(**_MVIT)}),
    "mvitv2_class_token": Form(
        mvitv2.MultiScaleVit,
        {
            "img_size": 32,
            "cfg": mvitv2.MultiScaleVitCfg(**_MVIT, use_cls_token=True, qkv_bias=False, expand_attn=False),
        },
    ),
    "nest": Form(
        nest.Nest,
        {"img_size": 32, "embed_dims": (16, 16, 32), "num_heads": (2,) * 3, "depths": (1,) * 3, "patch_size": 2},
    ),
    "nextvit": Form(_build_next_vit, {"sr_ratio": 2}),
    "nextvit_unpooled": Form(_build_next_vit, {"sr_ratio": 1}),
    "pvt": Form("pvt_v2_b0", _PYRAMID, size=64),
    "pvt_linear": Form("pvt_v2_b2_li", _PYRAMID, size=64),
    "swiftformer": Form("swiftformer_xs", {"layers": (1,) * 4, "embed_dims": (16, 16, 16, 32)}, size=64),
    "swin": Form("swin_tiny_patch4_window7_224", _SWIN),
    "swin_wide_fused": Form(
        "swin_tiny_patch4_window7_224", _SWIN | {"head_dim": 12, "qkv_bias": False}, _set(fused_attn=True)
    ),
    "swinv2": Form("swinv2_tiny_window8_256", _SWIN),
    "swinv2_bias_apart": Form("swinv2_tiny_window8_256", _SWIN, _set(qkv_bias_separate=True)),
    "swinv2_cr": Form("swinv2_cr_tiny_224", _SWIN),
    "tiny_vit": Form("tiny_vit_5m_224", _PYRAMID | {"window_sizes": (2,) * 4}, size=64),
    "tnt": Form(
        "tnt_s_patch16_224",
        {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2}
        | {"inner_dim": 16, "num_heads_inner": 2, "num_heads_outer": 2, "first_stride": 2},
    ),
    "twins": Form("twins_svt_small", _PYRAMID | {"img_size": 64, "depths": (2, 2, 1, 1), "wss": (4, 2, 2, 2)}, size=64),
    "twins_pooled": Form("twins_pcpvt_small", _PYRAMID | {"img_size": 64}, size=64),
    "volo": Form(
        volo.VOLO,
        {"img_size": 32, "layers": (1,) * 4, "embed_dims": (16, 32, 32, 32), "num_heads": (2,) * 4}
        | {"stem_hidden_dim": 8, "qkv_bias": True},
    ),
    "xcit": Form("xcit_nano_12_p8_224", _VIT | {"depth": 1}),
}


@pytest.fixture(scope="session")
def build_form(build_seeded: Callable[..., nn.Module]) -> BuildForm:
    """Build the small stock model of a form, in eval mode, the same for the same seed."""

    def build(form: str, *, seed: int = 0) -> nn.Module:
        plan = FORMS[form]

        def make() -> nn.Module:
            arguments = {"num_classes": 3, **plan.kwargs}
            by_name = isinstance(plan.backbone, str)
            model = timm.create_model(plan.backbone, **arguments) if by_name else plan.backbone(**arguments)
            plan.edit(model)
            return model

        return build_seeded(make, seed)

    return build


@pytest.fixture(scope="session")
def all_forms() -> tuple[str, ...]:
    """The names of all forms of attention."""
    return tuple(FORMS)


@pytest.fixture(params=FORMS)
def every_form(request: pytest.FixtureRequest) -> str:
    """Every form of attention in turn."""
    return str(request.param)


@pytest.fixture(scope="session")
def run_form() -> Callable[[nn.Module, str], Tensor]:
    """Call a model with images (four, if not said) and whatever else its form is called with; give its logits."""

    def run(model: nn.Module, form: str, count: int = 4) -> Tensor:
        plan = FORMS[form]
        x: Any = torch.randn(count, 3, plan.size, plan.size, generator=torch.Generator().manual_seed(7))
        if form == "naflex":  # as patches; all images but the first end in padding
            patches = x.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 4, 5, 1).reshape(count, 16, -1)
            grid = torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(count, 16, 2)
            valid = torch.arange(16) < torch.tensor([16] + [12] * (count - 1))[:, None]
            x = {"patches": patches, "patch_coord": grid, "patch_valid": valid}
        logits = model(x, **plan.call)
        return logits if isinstance(logits, Tensor) else torch.cat([each.flatten(1) for each in logits], dim=1)

    return run


@pytest.fixture(scope="session")
def gradients_of() -> Callable[[nn.Module], dict[str, Tensor]]:
    """Give a model's gradients under timm's names: those of parts that stand apart put together again."""

    def read(model: nn.Module) -> dict[str, Tensor]:
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        for name, attention in iter_attentions(model):
            for place in find_places(attention, name):
                if isinstance(place.child, Projection):
                    for kind in KINDS:
                        joined = _take_parts(gradients, place.name, place.child, kind)
                        gradients |= {} if joined is None else {f"{place.name}.{kind}": joined}
        return gradients

    return read


def _take_parts(gradients: dict[str, Tensor], name: str, child: Projection, kind: str) -> Tensor | None:
    found = {part: gradients.pop(f"{name}.{child.stored_key(part, kind)}", None) for part in child.layout.parts}
    turned = kind == "weight" and child.transposed
    there = {part: grad.t() if turned else grad for part, grad in found.items() if grad is not None}
    return child.layout.join(there) if there else None
