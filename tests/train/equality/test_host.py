import pytest
import torch

from train.equality import host
from train.equality.host import iter_bytes


def mixed(device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(64, 3, device=device).t(),
        torch.randn(5, device=device).to(torch.bfloat16),
        torch.ones((), device=device),
        torch.randn(2, 2, dtype=torch.complex64, device=device).conj(),
        torch.randn(2, 2, dtype=torch.complex64, device=device).conj().imag,
        torch.empty(0, 3, device=device),
        torch.randn(4, 4, device=device, requires_grad=True),
    ]


def as_values(tensors: list[torch.Tensor]) -> list[bytes]:
    """The bytes in order of the rows, by another way."""
    return [bytes(t.detach().cpu().resolve_conj().resolve_neg().flatten().view(torch.uint8).tolist()) for t in tensors]


def test_bytes_come_row_by_row_whatever_the_layout() -> None:
    tensors = mixed("cpu")
    assert [bytes(data) for data in iter_bytes(tensors)] == as_values(tensors)


def test_plain_tensors_are_not_copied() -> None:
    tensor = torch.zeros(3)
    (data,) = iter_bytes([tensor])
    tensor[0] = 1
    assert bytes(data)[:4] != bytes(4)


@pytest.mark.gpu
@pytest.mark.parametrize("ahead_bytes", [0, 1 << 20])
def test_bytes_from_the_gpu_are_those_of_the_host_in_order(monkeypatch, ahead_bytes) -> None:
    monkeypatch.setattr(host, "_AHEAD_BYTES", ahead_bytes)
    tensors = [tensor for pair in zip(mixed("cuda"), mixed("cpu"), strict=True) for tensor in pair]
    assert [bytes(data) for data in iter_bytes(tensors)] == as_values(tensors)
