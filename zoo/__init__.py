"""A zoo of timm Vision Transformers with attention of your own.

Shapes, everywhere: B batch, N tokens, C = `dim`, H heads, D = `head_dim`, K classes. Images are (B, 3, height, width).

The names below load on first use (PEP 562), so that `zoo.card` and `zoo.preprocess` import without torch.
No file bears a public function's name: importing `zoo.audit` as a module would hide `zoo.audit` the function.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.attention import Attention as Attention
    from zoo.auditing.report import AuditReport as AuditReport
    from zoo.auditing.report import Finding as Finding
    from zoo.auditing.report import audit as audit
    from zoo.auditing.snapshots import snapshot as snapshot
    from zoo.backbones import Backbone as Backbone
    from zoo.backbones import list_backbones as list_backbones
    from zoo.bundle import load_bundle as load_bundle
    from zoo.bundle import save_bundle as save_bundle
    from zoo.card import ModelCard as ModelCard
    from zoo.commands.describing import describe as describe
    from zoo.commands.description import Description as Description
    from zoo.conversion import ConversionReport as ConversionReport
    from zoo.conversion import convert as convert
    from zoo.create import create_model as create_model
    from zoo.errors import ZooError as ZooError
    from zoo.freezing import freeze as freeze
    from zoo.freezing import unfreeze as unfreeze
    from zoo.plugins import load_plugins as load_plugins
    from zoo.plugins import plugin_sources as plugin_sources
    from zoo.pretrained import PretrainedReport as PretrainedReport
    from zoo.pretrained import find_report as find_report
    from zoo.registry import list_attentions as list_attentions
    from zoo.registry import register_attention as register_attention
    from zoo.swap import SwapReport as SwapReport
    from zoo.swap import restore_attention as restore_attention
    from zoo.swap import swap_attention as swap_attention
    from zoo.tying import tie as tie
    from zoo.weights import attention_weights as attention_weights

_HOMES = {
    "Attention": "attention",
    "AuditReport": "auditing.report",
    "Backbone": "backbones",
    "ConversionReport": "conversion",
    "Description": "commands.description",
    "Finding": "auditing.report",
    "ModelCard": "card",
    "PretrainedReport": "pretrained",
    "SwapReport": "swap",
    "ZooError": "errors",
    "attention_weights": "weights",
    "audit": "auditing.report",
    "convert": "conversion",
    "create_model": "create",
    "describe": "commands.describing",
    "find_report": "pretrained",
    "freeze": "freezing",
    "list_attentions": "registry",
    "list_backbones": "backbones",
    "load_bundle": "bundle",
    "load_plugins": "plugins",
    "plugin_sources": "plugins",
    "register_attention": "registry",
    "restore_attention": "swap",
    "save_bundle": "bundle",
    "snapshot": "auditing.snapshots",
    "swap_attention": "swap",
    "tie": "tying",
    "unfreeze": "freezing",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'zoo' has no attribute {name!r}")
    if _HOMES[name] not in ("backbones", "card", "description", "errors"):
        import_module("zoo.projections")  # registers the built-in variants, whichever name came first
    return getattr(import_module(f"zoo.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
