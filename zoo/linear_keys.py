"""Let a stock timm state_dict load into a projection: its fused `weight` and `bias` become the parts stored there."""

from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from zoo.layout import Layout


class Parted(Protocol):
    """What the hook asks of a projection."""

    in_features: int
    layout: Layout
    transposed: bool

    def part_tensors(self, kind: str) -> dict[str, Tensor]:
        """Return each part's `weight` or `bias`."""
        ...

    def stored_key(self, part: str, kind: str) -> str:
        """Return the state_dict key, below the projection, of a part."""
        ...


def split_linear_keys(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Turn `weight` and `bias` of an nn.Linear into the parts that a projection stores: a load_state_dict pre-hook.

    torch hands over a dict of its own, so the caller's stays as it is. A wrong shape gets the message that an
    nn.Linear would give; with strict=False too, where leaving the key would silently load nothing.
    """
    projection = cast(Parted, module)
    metadata, errors = rest[0], rest[-1]
    layout = projection.layout
    for kind, shape in (("weight", (layout.total, projection.in_features)), ("bias", (layout.total,))):
        fused, own = state_dict.get(prefix + kind), projection.part_tensors(kind)
        if not isinstance(fused, Tensor) or not own:
            continue  # torch names the key as missing or unexpected
        del state_dict[prefix + kind]
        fits = fused.shape == shape
        if not fits:
            errors.append(
                f"size mismatch for {prefix}{kind}: copying a param with shape {fused.shape} from checkpoint, "
                f"the shape in current model is {torch.Size(shape)}."
            )
        for part, piece in (layout.split(fused) if fits else own).items():
            turned = piece.t() if kind == "weight" and projection.transposed else piece
            if metadata.get("assign_to_params_buffers", False):  # these tensors become the parameters
                turned = turned.clone(memory_format=torch.contiguous_format)
            state_dict[prefix + projection.stored_key(part, kind)] = turned
