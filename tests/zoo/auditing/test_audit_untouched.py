"""No false alarm: the audit on untouched timm models, with a probe where they are small, on meta where not."""

from typing import Any

import pytest
import timm
import torch
from torch import nn

import zoo
from zoo.slots import looks_like_attention

THIN: dict[str, Any] = {"embed_dim": 32, "depth": 2, "num_heads": 2}
TINY: dict[str, Any] = {"img_size": 32, "patch_size": 8, **THIN}
SMALL: dict[str, Any] = {"img_size": 32, **THIN}
WINDOWS: dict[str, Any] = {"img_size": 64, "window_size": 4, "embed_dim": 16, "depths": (1, 2), "num_heads": (2, 2)}
STAGES: dict[str, Any] = {"embed_dims": (16, 32, 32, 32), "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 2)}

# One small model of each file and form; an image size that the constructor does not take is given to the batch alone.
MODELS: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": TINY,
    "deit_tiny_distilled_patch16_224": TINY,
    "deit3_small_patch16_224": TINY,
    "vit_base_patch16_clip_224": TINY,
    "vit_base_patch16_siglip_224": SMALL,
    "vit_small_patch14_reg4_dinov2": {**SMALL, "img_size": 28},
    "vit_small_patch16_dinov3": SMALL,
    "vit_small_patch16_rope_mixed_224": SMALL,
    "vit_base_patch16_sapiens2": {**TINY, "num_kv_heads": (2, 1)},
    "vit_base_patch16_xp_224": TINY,
    "vit_small_patch16_18x2_224": TINY,
    "vit_dlittle_patch16_reg1_gap_256": TINY,
    "vit_dpwee_patch16_reg1_gap_256": TINY,
    "vit_relpos_small_patch16_224": SMALL,
    "vit_tiny_r_s16_p8_224": {**SMALL, "img_size": 64},
    "vit_pe_core_tiny_patch16_384": SMALL,
    "aimv2_large_patch14_224": {**SMALL, "img_size": 28},
    "naflexvit_base_patch16_gap": THIN,
    "flexivit_small": TINY,
    "samvit_base_patch16": {**TINY, "img_size": 64, "global_attn_indexes": (1,), "window_size": 4},
    "eva02_tiny_patch14_224": {**SMALL, "img_size": 28},
    "beit_base_patch16_224": SMALL,
    "beit3_base_patch16_224": SMALL,
    "gemma4_vit_167m": {**THIN, "img_size": 48},
    "cait_xxs24_224": SMALL,
    "xcit_nano_12_p16_224": SMALL,
    "convit_tiny": {**SMALL, "local_up_to_layer": 1},
    "tnt_s_legacy_patch16_224": {
        "img_size": 32,
        "embed_dim": 32,
        "inner_dim": 16,
        "depth": 2,
        "num_heads_inner": 2,
        "num_heads_outer": 2,
    },
    "swin_tiny_patch4_window7_224": WINDOWS,
    "swinv2_tiny_window8_256": WINDOWS,
    "swinv2_cr_tiny_224": WINDOWS,
    "twins_pcpvt_small": {"img_size": 64, **STAGES},
    "twins_svt_small": {"img_size": 224, **STAGES, "depths": (1, 2, 2, 2)},
    "pvt_v2_b0": {"img_size": 64, "depths": (1, 1, 1, 1)},
    "coat_lite_tiny": {"img_size": 64},
    "coat_tiny": {"img_size": 64, "serial_depths": (1, 1, 1, 1), "parallel_depth": 1},
    "levit_128s": {"img_size": 64, "embed_dim": (32, 32, 32), "depth": (1, 1, 1), "num_heads": (2, 2, 2)},
    "davit_tiny": {"img_size": 64, **STAGES, "num_heads": (2, 2, 2, 2)},
    "hiera_tiny_224": {"img_size": 64, "embed_dim": 16, "num_heads": 1, "stages": (1, 1, 2, 1)},
    "sam2_hiera_tiny": {"img_size": 64, "embed_dim": 16},
    "gcvit_xxtiny": {"img_size": 64},
    "edgenext_xx_small": {"img_size": 64},
    "mobilevit_xxs": {"img_size": 64},
    "mobilevitv2_050": {"img_size": 64},
    "tiny_vit_5m_224": {"img_size": 64},
    "crossvit_tiny_240": {"img_size": 240},
    "pit_ti_224": {"img_size": 64},
    "csatv2": {"img_size": 64},
    "maxvit_rmlp_pico_rw_256": {"img_size": 64},
    "coatnet_pico_rw_224": {"img_size": 64},
    "efficientformer_l1": {"img_size": 224},
    "efficientformerv2_s0": {"img_size": 224},
    "fastvit_sa12": {"img_size": 64},
    "volo_d1_224": {"img_size": 64},
    "nest_tiny": {"img_size": 64},
    "mvitv2_tiny": {"img_size": 64},
    "caformer_s18": {"img_size": 64},
    "visformer_tiny": {"img_size": 64},
    "efficientvit_b0": {"img_size": 64},
    "efficientvit_m0": {"img_size": 224},
    "swiftformer_xs": {"img_size": 64},
    "shvit_s1": {"img_size": 64},
    "iformer_t": {"img_size": 64},
    "lowformer_b0": {"img_size": 64},
    "cpubone_nano": {"img_size": 64},
    "mobilenetv4_hybrid_medium": {"img_size": 64},
    "botnet26t_256": {"img_size": 256},
    "halonet26t": {"img_size": 256},
    "lambda_resnet26t": {"img_size": 128},
    "resnet10t": {"img_size": 64},
    "mixer_s32_224": {"img_size": 64},
    "convnext_atto": {"img_size": 64, "depths": (1, 1, 1, 1), "dims": (8, 16, 32, 64)},
}
FAST = {"vit_tiny_patch16_224", "eva02_tiny_patch14_224", "vit_small_patch16_dinov3", "cait_xxs24_224", "resnet10t"}


def build(name: str) -> tuple[nn.Module, torch.Tensor]:
    """Return a small model and a batch for it."""
    options = dict(MODELS[name])
    size = options.get("img_size", 64)
    torch.manual_seed(0)
    try:
        model = timm.create_model(name, num_classes=3, **options)
    except TypeError:
        options.pop("img_size")
        model = timm.create_model(name, num_classes=3, **options)
    return model, torch.randn(2, 3, size, size)


def alarms(report: zoo.AuditReport) -> list[str]:
    return [str(finding) for finding in report.findings if finding.severity != "note"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in MODELS]
)
def test_untouched_model_raises_no_alarm_as_it_stands_and_when_it_runs(name) -> None:
    model, images = build(name)
    report = zoo.audit(model, torch.optim.AdamW(model.parameters()), batch=images)
    assert alarms(report) == []
    assert {finding.check for finding in report.findings} <= {"tie"}
    assert ("coat" in name and "coatnet" not in name) or report.findings == ()  # CoaT's stages share their encodings


@pytest.mark.slow
def test_every_tenth_attention_model_of_timm_raises_no_alarm_on_meta() -> None:
    reports = {}
    for name in timm.list_models()[::10]:
        with torch.device("meta"):
            model = timm.create_model(name)
        if any(looks_like_attention(module) for module in model.modules()):
            reports[name] = zoo.audit(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert {name: alarms(report) for name, report in reports.items() if alarms(report)} == {}
    assert len(reports) > 50
