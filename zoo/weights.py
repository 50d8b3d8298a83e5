"""Look at attention's weights one by one, in one orientation, whatever variant stores them."""

from torch import Tensor, nn

from zoo.init import part_sizes
from zoo.projections import part_biases, part_weights
from zoo.timm_map import iter_attentions, outside_biases, present_slots


def attention_weights(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return q, k, v and out of every attention in a model, and their biases.

    Args:
        model: A timm model, swapped or stock, or any module that holds attention known to `zoo.timm_map`.

    Returns:
        By the attention module's name: "q", "k", "v" and "out", each (out, in) as nn.Linear holds them, and where
        there are biases "q_bias", "k_bias", "v_bias" and "out_bias", each (out,). All are views of the model's own
        storage, attached to autograd: detach before you write.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for name, attention in iter_attentions(model):
        tensors: dict[str, Tensor] = {}
        biases: dict[str, Tensor | None] = {}
        for slot in present_slots(attention):
            child = attention.get_submodule(slot.child)
            sizes = part_sizes(child, slot.parts)
            tensors |= part_weights(child, sizes)
            biases |= part_biases(child, sizes)
        biases |= outside_biases(attention)
        found[name] = tensors | {f"{part}_bias": bias for part, bias in biases.items() if bias is not None}
    return found
