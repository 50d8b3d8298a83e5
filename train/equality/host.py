"""The bytes of tensors in the host's memory, one after the other, without a copy where they are there already."""

from collections import deque
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from zoo.auditing.snapshots import host_bytes

# What numpy can look at without a copy; others, bfloat16 among them, go by way of bytes.
_PLAIN = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32}
    | {torch.int64}
)
_AHEAD_BYTES = 64 << 20  # of a device's tensors that are on their way to the host while others are read


def iter_bytes(tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    """Yield each tensor's bytes, row by row, whatever its layout in memory; equal NaNs agree, +0 and -0 do not.

    Copies from a device run ahead into pinned memory, while the bytes before them are worked on.
    """
    under_way: deque[tuple[Tensor, torch.Event | None]] = deque()
    ahead = 0
    for tensor in tensors:
        if tensor.is_cpu and not under_way:
            yield _look(tensor)
            continue
        under_way.append(_send(tensor))
        ahead += tensor.nbytes
        while ahead > _AHEAD_BYTES and len(under_way) > 1:
            ahead -= under_way[0][0].nbytes
            yield _receive(*under_way.popleft())
    while under_way:
        yield _receive(*under_way.popleft())


def _send(tensor: Tensor) -> tuple[Tensor, torch.Event | None]:
    if tensor.is_cpu:
        return tensor, None
    copy = tensor.detach().contiguous().to("cpu", non_blocking=True)  # into pinned memory
    return copy, torch.accelerator.current_stream(tensor.device).record_event()


def _receive(copy: Tensor, copied: torch.Event | None) -> memoryview:
    if copied is not None:
        copied.synchronize()
    return _look(copy)


def _look(tensor: Tensor) -> memoryview:
    if tensor.dtype in _PLAIN and tensor.is_contiguous() and not tensor.is_neg():
        return tensor.detach().numpy().data
    return host_bytes(tensor)
