import pytest
import torch
from accelerate import Accelerator

from train.equality import differences
from train.equality.differences import measure

NAN, INF = float("nan"), float("inf")


def tensors_of(rank: int) -> dict[str, torch.Tensor]:
    long = torch.zeros(3, 100)
    long[2, 37] = rank * 0.25
    return {
        "several pieces": long,
        "transposed": torch.arange(6.0).view(2, 3).t() + torch.tensor([[0.0, 0], [0, 0], [0, 8.0 * rank]]),
        "scalar": torch.tensor(1.0 + rank),
        "bfloat16": torch.tensor([1.0, 2.0 + rank]).to(torch.bfloat16),
        "bool": torch.tensor([True, rank == 0]),
        "int64": torch.tensor([1 << 40, (1 << 40) + 3 * rank]),
        "complex": torch.tensor([1 + 1j, 1 + 1j * (1 + 2 * rank)]),
        "NaN on one": torch.tensor([0.0, NAN if rank else 1.0, 2.0 + rank]),
        "Inf on both": torch.tensor([INF, -INF if rank else INF]),
        "sign of zero": torch.tensor([-0.0 if rank else 0.0]),
    }


def measure_all(accelerator: Accelerator) -> dict[str, str]:
    differences._PIECE_BYTES = 64
    return {name: str(gap) for name, gap in measure(tensors_of(accelerator.process_index), accelerator).items()}


@pytest.mark.slow
def test_widest_gap_is_found_with_its_place_and_ranks_for_any_dtype(run_ranks) -> None:
    first, second = run_ranks(measure_all)
    assert not first.error, first.traceback
    assert first.value == second.value
    assert first.value == {
        "several pieces": "largest difference 0.25 at [2, 37]: 0.25 on rank 1, 0 on rank 0",
        "transposed": "largest difference 8 at [2, 1]: 13 on rank 1, 5 on rank 0",
        "scalar": "largest difference 1: 2 on rank 1, 1 on rank 0",
        "bfloat16": "largest difference 1 at [1]: 3 on rank 1, 2 on rank 0",
        "bool": "largest difference 1 at [1]: 1 on rank 0, 0 on rank 1",
        "int64": "largest difference 3 at [1]: 1.09951163e+12 on rank 1, 1.09951163e+12 on rank 0",
        "complex": "largest difference 2 at [1]: 3 on rank 1, 1 on rank 0",
        "NaN on one": "largest difference 1 at [2]: 3 on rank 1, 2 on rank 0; NaN or Inf in 1 of 3 on rank 1, "
        "none on rank 0",
        "Inf on both": "they differ where values are NaN or Inf",
        "sign of zero": "the values are equal: the sign of a zero, or bits of a NaN, differ",
    }
