"""What `attention_weights` calls q, k, v and out is what timm's forward uses as such, head by head."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import zoo
from zoo.slots import iter_attentions, qualified_name
from zoo.timm_map import ROWS, AttentionRow

pytestmark = pytest.mark.slow  # by their number

BuildForm = Callable[..., nn.Module]
Operands = dict[str, Tensor]
Call = tuple[tuple[Any, ...], dict[str, Any]]

_PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm)
_SOFTMAXES = (torch.softmax, torch.Tensor.softmax, F.softmax)

# Where each part enters: softmax(q @ k) @ v, seen in scaled_dot_product_attention or in two products. Others say so.
USUAL = {"q": "first.left", "k": "first.right", "v": "second.right"}
FLOWS: Mapping[str, Mapping[str, str]] = {
    "timm.models.coat.FactorAttnConvRelPosEnc": {"k": "first.left", "v": "first.right", "q": "second.left"},
    "timm.models.davit.ChannelAttention": {"k": "first.left", "v": "first.right", "q": "second.right"},
    "timm.models.swiftformer.EfficientAdditiveAttention": {"q": "first.left"},  # times keys without a product
    "timm.models.volo.OutlookAttention": {"v": "first.right"},
}


class _Products(TorchFunctionMode):
    """Keep the operands of attention's products: the first, and the first after the last softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Tensor, ...]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kinds = {"attention": (F.scaled_dot_product_attention,), "product": _PRODUCTS, "softmax": _SOFTMAXES}
        for kind, functions in kinds.items():
            if func in functions:
                self.calls.append((kind, tuple(arg.detach().clone() for arg in args if isinstance(arg, Tensor))))
        return func(*args, **(kwargs or {}))

    def operands(self) -> Operands:
        attentions = [tensors for kind, tensors in self.calls if kind == "attention"]
        if attentions:
            return dict(zip(("first.left", "first.right", "second.right"), attentions[0], strict=False))
        kinds = [kind for kind, _ in self.calls]
        first = kinds.index("product")
        after = max((index for index, kind in enumerate(kinds) if kind == "softmax"), default=first)
        pairs = {"first": self.calls[first][1]}
        rest = [tensors for kind, tensors in self.calls[max(first, after) + 1 :] if kind == "product"]
        pairs |= {"second": rest[0]} if rest else {}
        sides = ("left", "right")
        return {f"{which}.{side}": pair[index] for which, pair in pairs.items() for index, side in enumerate(sides)}


def watch(attention: nn.Module, call: Call) -> tuple[Operands, Tensor]:
    with torch.no_grad(), _Products() as products:
        output = attention(*call[0], **call[1])
    return products.operands(), (output if isinstance(output, Tensor) else output[0]).clone()


def calls_of(model: nn.Module, run: Callable[[], object]) -> dict[str, Call]:
    """Return what each attention of a model is called with."""
    calls: dict[str, Call] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda _, args, kwargs, name=name: calls.update({name: (args, kwargs)}), with_kwargs=True
        )
        for name, module in iter_attentions(model)
    ]
    run()
    for hook in hooks:
        hook.remove()
    return calls


def check_labels(model: nn.Module, run: Callable[[], object]) -> int:
    """Change the parts of each attention, one by one: fail where another operand changes, or another head.

    Returns how many parts were seen to enter where they should.
    """
    calls = calls_of(model, run)
    zoo.swap_attention(model, "separate")  # parts are views of the model's own storage
    weights = zoo.attention_weights(model)
    seen = 0
    for name, attention in iter_attentions(model):
        cls = qualified_name(attention)
        flow = FLOWS.get(cls, USUAL)
        before, output = watch(attention, calls[name])
        for key, weight in weights[name].items():
            tensor = weight.detach()
            own = {flow[key[0]]} if key[0] in flow else set()
            after, new = changed(attention, calls[name], tensor)
            moved = {where for where in flow.values() if not torch.equal(before[where], after[where])}
            assert moved == own, f"{name} ({cls}): {key} reaches {moved}, not {own}"
            assert own or not torch.equal(new, output), f"{name} ({cls}): {key} does nothing"
            for where in own:
                half, _ = changed(attention, calls[name], tensor[: len(tensor) // 2])
                assert in_first_heads(attention, before[where], half[where]), f"{name} ({cls}): {key}'s heads"
            seen += len(own)
    return seen


def changed(attention: nn.Module, call: Call, tensor: Tensor) -> tuple[Operands, Tensor]:
    """Return operands and output with other values in a part, or in some of its rows; put the old ones back."""
    old = tensor.clone()
    tensor.add_(torch.rand(tensor.shape, generator=torch.Generator().manual_seed(1)), alpha=0.3)
    after = watch(attention, call)
    tensor.copy_(old)
    return after


def in_first_heads(attention: nn.Module, before: Tensor, after: Tensor) -> bool:
    """Say whether two operands differ, and in the first half of the heads only.

    Heads are an axis of their own, before the last, of twice their number where each attends twice, or inside of the
    first axis: (..., H, ..., D), (..., 2*H, ..., D) or (B*H, N, D).
    """
    num_heads = getattr(attention, "num_heads", None) or getattr(attention, "groups", 1)
    if num_heads % 2:
        return True
    same = (before == after).flatten(-1)
    axes = [axis for axis in range(1, same.dim() - 1) if same.shape[axis] in (num_heads, 2 * num_heads)]
    inside = same.unflatten(0, (-1, num_heads)).chunk(2, 1) if same.shape[0] % num_heads == 0 else ()
    halves = [same.chunk(2, axis) for axis in axes] + [inside] * bool(inside)
    return any(bool(second.all()) and not bool(first.all()) for first, second in halves)


@pytest.fixture
def check(build_form: BuildForm, run_form: Callable[..., Tensor]) -> Callable[[str], int]:
    def check_form(form: str) -> int:
        model = build_form(form)
        return check_labels(model, lambda: run_form(model, form))

    return check_form


def test_parts_are_what_their_names_say(check: Callable[[str], int], every_form: str) -> None:
    assert check(every_form) >= 2


def _with_slot(row: AttentionRow, index: int, **changes: object) -> AttentionRow:
    slots = list(row.slots)
    slots[index] = replace(slots[index], **changes)  # type: ignore[arg-type]
    return replace(row, slots=tuple(slots))


@pytest.mark.parametrize(
    ("form", "name", "index", "fault", "message"),
    [
        ("vit", "timm.layers.attention.Attention", 0, {"parts": ("q", "v", "k")}, "v reaches {'first.right'}"),
        ("scaling", "timm.models.vision_transformer.ParallelScalingBlock", 0, {"parts": ("q", "mlp", "k", "v")}, "q"),
        ("tnt", "timm.models.tnt.Attention", 0, {"parts": ("k", "q")}, "k reaches {'first.left'}"),
        ("pvt", "timm.models.pvt_v2.Attention", 1, {"parts": ("v", "k")}, "v reaches {'first.right'}"),
        ("levit", "timm.models.levit.Attention", 0, {"by_head": False}, "q reaches"),
        ("tiny_vit", "timm.models.tiny_vit.Attention", 0, {"by_head": False}, "q reaches"),
        ("swin", "timm.models.swin_transformer.WindowAttention", 0, {"by_head": True}, "q reaches"),
        ("levit", "timm.models.levit.Attention", 0, {"widths": ("key_dim", "val_dim", "key_dim")}, "reaches"),
        ("gcvit", "timm.models.gcvit.WindowAttentionGlobal", 0, {"parts": ("v", "k")}, "v reaches {'first.right'}"),
    ],
)
def test_a_row_that_names_a_part_wrongly_is_seen(
    check: Callable[[str], int],
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    name: str,
    index: int,
    fault: dict[str, object],
    message: str,
) -> None:
    monkeypatch.setitem(ROWS, name, _with_slot(ROWS[name], index, **fault))
    with pytest.raises(AssertionError, match=message):
        check(form)


def test_heads_in_another_order_are_seen(build_form: BuildForm, run_form: Callable[..., Tensor]) -> None:
    model = build_form("vit")
    attention = model.get_submodule("blocks.0.attn")
    before, _ = watch(attention, calls_of(model, lambda: run_form(model, "vit"))["blocks.0.attn"])
    q = before["first.left"]
    first, second = q.clone(), q.clone()
    first[:, 0] += 1
    second[:, 1] += 1
    assert in_first_heads(attention, q, first)
    assert not in_first_heads(attention, q, second)
    assert not in_first_heads(attention, q, q)
