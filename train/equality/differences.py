"""How far apart ranks are in one tensor: the largest absolute difference, where, and between which ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor

from train.equality.phrases import name_ranks

_PIECE_BYTES = 4 << 20  # of each rank's tensor that are gathered at a time


@dataclass(frozen=True)
class Difference:
    """The widest gap between ranks in one tensor.

    Attributes:
        largest: The largest absolute difference of two ranks' finite values; 0.0 if bits alone differ, as +0 and -0.
        place: Index of the element.
        low: The rank that holds the smaller value there, and the value.
        high: The rank that holds the larger value there, and the value.
        non_finite: NaN and infinite values on each rank.
        size: Values in the tensor.
    """

    largest: float
    place: tuple[int, ...]
    low: tuple[int, float]
    high: tuple[int, float]
    non_finite: tuple[int, ...]
    size: int

    @property
    def odd(self) -> list[int]:
        """The ranks that hold NaN or Inf, where others hold none."""
        return [rank for rank, count in enumerate(self.non_finite) if count] if 0 in self.non_finite else []

    def __str__(self) -> str:
        parts = []
        if self.largest:
            (low, below), (high, above) = self.low, self.high
            where = f" at {list(self.place)}" if self.place else ""
            parts.append(
                f"largest difference {self.largest:.3g}{where}: {above:.9g} on rank {high}, {below:.9g} on rank {low}"
            )
        if self.odd:
            counts = ", ".join(f"{self.non_finite[rank]} of {self.size} on rank {rank}" for rank in self.odd)
            clean = [rank for rank, count in enumerate(self.non_finite) if not count]
            parts.append(f"NaN or Inf in {counts}, none on {name_ranks(clean)}")
        elif any(self.non_finite) and not self.largest:
            parts.append("they differ where values are NaN or Inf")
        return "; ".join(parts) or "the values are equal: the sign of a zero, or bits of a NaN, differ"


def measure(tensors: Mapping[str, Tensor], accelerator: Accelerator) -> dict[str, Difference]:
    """Compare tensors value by value over the ranks; every rank calls it with the same names, shapes and dtypes.

    Args:
        tensors: By name, in the same order on every rank.
        accelerator: The world; at most 4 MiB of each rank are gathered at a time.
    """
    return {name: _measure(tensor, accelerator) for name, tensor in tensors.items()}


def _measure(tensor: Tensor, accelerator: Accelerator) -> Difference:
    values = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    step = max(1, _PIECE_BYTES // values.element_size())
    pieces = [_gap(values[start : start + step], start, accelerator) for start in range(0, len(values), step)]
    widest = max(pieces, key=lambda piece: piece[0])
    largest, flat, low, high, _ = widest
    place = torch.unravel_index(torch.tensor(flat), tensor.shape)
    counts = [sum(piece[4][rank] for piece in pieces) for rank in range(accelerator.num_processes)]
    return Difference(largest, tuple(int(i) for i in place), low, high, tuple(counts), len(values))


def _gap(
    piece: Tensor, start: int, accelerator: Accelerator
) -> tuple[float, int, tuple[int, float], tuple[int, float], Sequence[int]]:
    sent = piece.view(torch.uint8)[None].to(accelerator.device)
    rows = _as_reals(accelerator.gather(sent).cpu().view(piece.dtype))  # (world_size, values, 1 or 2)
    finite = rows.isfinite()
    shared = finite.all(dim=0, keepdim=True)
    rows = torch.where(shared, rows, 0)  # where one rank's is NaN there is no difference to tell
    high, low = rows.max(dim=0), rows.min(dim=0)
    gaps = (high.values - low.values).flatten()
    at = int(gaps.argmax())
    flat = start + at // rows.shape[-1]
    (low_rank, below), (high_rank, above) = (
        (int(end.indices.flatten()[at]), float(end.values.flatten()[at])) for end in (low, high)
    )
    counts = (~finite).any(dim=-1).sum(dim=1).tolist()
    return float(gaps[at]), flat, (low_rank, below), (high_rank, above), counts


def _as_reals(rows: Tensor) -> Tensor:
    return (torch.view_as_real(rows) if rows.is_complex() else rows[..., None]).double()
