"""Look at attention's weights one by one, in one orientation, whatever variant stores them."""

from torch import Tensor, nn

from zoo.projections import part_tensors
from zoo.slots import find_places, iter_attentions, outside_biases


def attention_weights(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return q, k, v and out of every attention in a model, and their biases.

    Args:
        model: A timm model, swapped or stock, or any module that holds attention known to `zoo.timm_map`.

    Returns:
        By the attention module's name: "q", "k", "v" and "out", each (out, in) as nn.Linear holds them, and where
        there are biases "q_bias", "k_bias", "v_bias" and "out_bias", each (out,). A class that has no such part leaves
        it out (the queries of a block that attends from outside). Attached to autograd: detach before you write. All
        are views of the model's own storage, but for an nn.Linear in which timm laid q, k and v head by head.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for name, attention in iter_attentions(model):
        tensors: dict[str, Tensor] = {}
        biases: dict[str, Tensor] = {}
        for place in find_places(attention, name):
            if place.holds_matrix:
                tensors |= part_tensors(place.child, place.layout, "weight")
                biases |= part_tensors(place.child, place.layout, "bias")
        biases |= outside_biases(attention)
        named = tensors | {f"{part}_bias": bias for part, bias in biases.items()}
        found[name] = {key: tensor for key, tensor in named.items() if not key.startswith("mlp")}
    return found
