"""Which children of which timm attention class are projections: a class that timm adds needs a row here, nothing else.

Each row was checked against timm 1.0.31 by comparing logits and gradients, bit for bit where the operations agree. A
class without a row is refused: that its children look right does not make a swap right.
"""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Slot:
    """A child of an attention module that holds the projections of these parts.

    Attributes:
        child: Path of the nn.Linear below the attention module.
        parts: What it projects to, in the order of its output. "mlp" is no part of attention: a block that runs both at
            once keeps its first MLP layer there.
        widths: Attributes that give the parts' widths in proportion, or one that holds them all; equal widths if empty.
        by_head: Whether the parts lie head by head, not side by side; or the attribute that says so.
        only_if: Attribute and value for which the child holds these parts, where that depends on the module.
    """

    child: str
    parts: tuple[str, ...]
    widths: tuple[str, ...] = ()
    by_head: bool | str = False
    only_if: tuple[str, object] | None = None


@dataclass(frozen=True)
class AttentionRow:
    """The slots of an attention class (those present on a module count) and where it keeps biases outside of them."""

    slots: tuple[Slot, ...]
    biases: tuple[tuple[str, str], ...] = ()  # (part, attribute of the attention module)

    @cached_property
    def children(self) -> dict[str, tuple[str, ...]]:
        """The children that may hold each part."""
        parts = {part for slot in self.slots for part in slot.parts}
        return {part: tuple(slot.child for slot in self.slots if part in slot.parts) for part in sorted(parts)}


def _row(*slots: Slot, biases: tuple[tuple[str, str], ...] = ()) -> AttentionRow:
    return AttentionRow(slots, biases)


_QKV = Slot("qkv", ("q", "k", "v"))
_OUT = Slot("proj", ("out",))
_Q, _K, _V = Slot("q", ("q",)), Slot("k", ("k",)), Slot("v", ("v",))
_KV = Slot("kv", ("k", "v"))
_QK = Slot("qk", ("q", "k"))
_APART = (Slot("q_proj", ("q",)), Slot("k_proj", ("k",)), Slot("v_proj", ("v",)))
_KEY_KEY_VALUE = ("key_dim", "key_dim", "val_dim")  # LeViT's family: values are wider than queries and keys
_IN_PROJ = Slot("in_proj", ("mlp", "q", "k", "v"), widths=("in_split",))
# q_bias and v_bias are timm's parameters, k_bias its zero buffer: they stay on the module
_BIASES = (("q", "q_bias"), ("k", "k_bias"), ("v", "v_bias"))

FUSED = _row(_QKV, _OUT)
PLAIN = "timm.layers.attention.Attention"
"""The one class of timm's that a variant which is a whole module (a `zoo.Attention`) can stand in for."""
ROWS: dict[str, AttentionRow] = {
    "zoo.attention.Attention": FUSED,
    PLAIN: FUSED,
    "timm.layers.attention.AttentionRope": _row(_QKV, *_APART, _OUT),
    "timm.layers.diff_attention.DiffAttention": FUSED,
    "timm.models.beit.Attention": _row(_QKV, _OUT, biases=_BIASES),
    "timm.models.cait.ClassAttn": _row(_Q, _K, _V, _OUT),
    "timm.models.cait.TalkingHeadAttn": FUSED,
    "timm.models.coat.FactorAttnConvRelPosEnc": FUSED,
    "timm.models.convit.GPSA": _row(_QK, _V, _OUT),
    "timm.models.convit.MHSA": FUSED,
    "timm.models.crossvit.CrossAttention": _row(Slot("wq", ("q",)), Slot("wk", ("k",)), Slot("wv", ("v",)), _OUT),
    "timm.models.csatv2.SpatialTransformerBlock": _row(_QKV),  # a block of one head over single numbers
    "timm.models.davit.ChannelAttention": FUSED,
    "timm.models.davit.ChannelAttentionV2": FUSED,
    "timm.models.davit.WindowAttention": FUSED,
    "timm.models.edgenext.CrossCovarianceAttn": FUSED,
    "timm.models.efficientformer.Attention": _row(Slot("qkv", ("q", "k", "v"), _KEY_KEY_VALUE, by_head=True), _OUT),
    "timm.models.eva.EvaAttention": _row(_QKV, *_APART, _OUT, biases=_BIASES),
    "timm.models.fastvit.Attention": FUSED,
    "timm.models.gcvit.WindowAttentionGlobal": _row(
        Slot("qkv", ("k", "v"), only_if=("use_global", True)),  # the queries come from the global tokens
        Slot("qkv", ("q", "k", "v"), only_if=("use_global", False)),
        _OUT,
    ),
    "timm.models.gemma4_vit.Gemma4Attention": _row(
        *(Slot(f"{part}_proj.linear", (part,)) for part in ("q", "k", "v")), Slot("o_proj.linear", ("out",))
    ),
    "timm.models.hiera.MaskUnitAttention": FUSED,
    "timm.models.hieradet_sam2.MultiScaleAttention": FUSED,
    "timm.models.levit.Attention": _row(
        Slot("qkv.linear", ("q", "k", "v"), _KEY_KEY_VALUE, by_head=True), Slot("proj.ln.linear", ("out",))
    ),
    "timm.models.levit.AttentionDownsample": _row(
        Slot("q.ln.linear", ("q",)),
        Slot("kv.linear", ("k", "v"), ("key_dim", "val_dim"), by_head=True),
        Slot("proj.ln.linear", ("out",)),
    ),
    "timm.models.maxxvit.AttentionCl": _row(Slot("qkv", ("q", "k", "v"), by_head="head_first"), _OUT),
    "timm.models.metaformer.Attention": FUSED,
    "timm.models.mvitv2.MultiScaleAttention": FUSED,
    "timm.models.nest.Attention": FUSED,
    "timm.models.nextvit.EfficientAttention": _row(_Q, _K, _V, _OUT),
    "timm.models.pvt_v2.Attention": _row(_Q, _KV, _OUT),
    "timm.models.swiftformer.EfficientAdditiveAttention": _row(
        Slot("to_query", ("q",)), Slot("to_key", ("k",)), Slot("final", ("out",))
    ),
    "timm.models.swin_transformer.WindowAttention": FUSED,
    "timm.models.swin_transformer_v2.WindowAttention": _row(_QKV, _OUT, biases=_BIASES),
    "timm.models.swin_transformer_v2_cr.WindowMultiHeadAttention": FUSED,
    "timm.models.tiny_vit.Attention": _row(Slot("qkv", ("q", "k", "v"), _KEY_KEY_VALUE, by_head=True), _OUT),
    "timm.models.tnt.Attention": _row(_QK, _V, _OUT),
    "timm.models.twins.GlobalSubSampleAttn": _row(_Q, _KV, _OUT),
    "timm.models.twins.LocallyGroupedAttn": FUSED,
    # no attention module of their own: one Linear holds the MLP's first layer and q, k and v. Where the output
    # projections are fused too, that Linear takes MLP and attention side by side and stays as it is.
    "timm.models.vision_transformer.DiffParallelScalingBlock": _row(_IN_PROJ),
    "timm.models.vision_transformer.ParallelScalingBlock": _row(_IN_PROJ, Slot("attn_out_proj", ("out",))),
    "timm.models.vision_transformer_relpos.RelPosAttention": FUSED,
    "timm.models.vision_transformer_sam.Attention": FUSED,
    "timm.models.volo.Attention": FUSED,
    "timm.models.volo.ClassAttention": _row(_Q, _KV, _OUT),
    "timm.models.volo.OutlookAttention": _row(_V, _OUT),  # its `attn` gives the attention itself: neither q nor k
    "timm.models.xcit.XCA": FUSED,
}

_CONV = "its projections are 1x1 convolutions, not nn.Linear"
_BROKEN = "timm's own forward multiplies shapes that do not fit, so no swap can be checked"
# Token attention that a swap cannot replace, and why: most of it has no nn.Linear for its projections.
REFUSED: dict[str, str] = {"timm.models.mvitv2.MultiScaleAttentionPoolFirst": _BROKEN} | dict.fromkeys(
    (
        "timm.layers.attention2d.Attention2d",
        "timm.layers.attention2d.MultiQueryAttention2d",
        "timm.layers.attention2d.MultiQueryAttentionV2",
        "timm.layers.bottleneck_attn.BottleneckAttn",
        "timm.layers.halo_attn.HaloAttn",
        "timm.layers.lambda_layer.LambdaLayer",
        "timm.layers.non_local_attn.NonLocalAttn",
        "timm.models.cpubone.ConvAttention",
        "timm.models.efficientformer_v2.Attention2d",
        "timm.models.efficientformer_v2.Attention2dDownsample",
        "timm.models.efficientvit_mit.LiteMLA",
        "timm.models.efficientvit_msra.CascadedGroupAttention",
        "timm.models.iformer.SHMA",
        "timm.models.lowformer.ConvAttention",
        "timm.models.maxxvit.Attention2d",
        "timm.models.mobilevit.LinearSelfAttention",
        "timm.models.shvit.SHSA",
        "timm.models.visformer.Attention",
    ),
    _CONV,
)

# Attention by name or by a softmax alone: gates over channels or positions, convolutions called so, state spaces, and
# heads that pool tokens. They belong to no block's token attention, so a swap leaves them as they are.
NOT_IN_A_BLOCK = frozenset(
    {
        "timm.layers.attention_pool.AttentionPoolLatent",
        "timm.layers.attention_pool.AttentionPoolPrr",
        "timm.layers.attention_pool2d.AttentionPool2d",
        "timm.layers.attention_pool2d.RotAttentionPool2d",
        "timm.layers.cbam.ChannelAttn",
        "timm.layers.cbam.LightChannelAttn",
        "timm.layers.cbam.LightSpatialAttn",
        "timm.layers.cbam.SpatialAttn",
        "timm.layers.coord_attn.CoordAttn",
        "timm.layers.coord_attn.EfficientLocalAttn",
        "timm.layers.coord_attn.SimpleCoordAttn",
        "timm.layers.coord_attn.StripAttn",
        "timm.layers.global_context.GlobalContext",
        "timm.layers.non_local_attn.BatNonLocalAttn",
        "timm.layers.non_local_attn.BilinearAttnTransform",
        "timm.layers.other_pool.SimPool1d",
        "timm.layers.other_pool.SimPool2d",
        "timm.layers.selective_kernel.SelectiveKernelAttn",
        "timm.layers.split_attn.SplitAttn",
        "timm.models.efficientvim.HSMSSD",
        "timm.models.nextvit.ConvAttention",
    }
)

# What a class calls itself when it is attention; one of such a name that no table above has is refused.
ATTENTION_WORDS = ("attention", "attn", "shma", "shsa", "mhsa", "litemla", "lambdalayer", "parallelscalingblock")
