"""Watch a forward pass from below autograd: what it reads that nobody registered, and where it makes its own."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Sighting(NamedTuple):
    """A tensor, and the path of the module that was running when it was first read or made."""

    tensor: Tensor
    place: str


class Witness(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records, while it is entered, what the operations of a module's forward read and make.

    Args:
        module: The module that will run; its children get hooks, so give a copy.
        known: What it may read: parameters, buffers, arguments.

    Attributes:
        strange: Tensors that were read, are none of the known and were not made by an operation, by storage.
    """

    def __init__(self, module: nn.Module, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.strange: dict[int, Sighting] = {}
        self._known = {_storage(tensor) for tensor in known}
        self._made: dict[int, Sighting] = {}  # which keeps the tensors, so that no other gets their memory meanwhile
        self._running = [""]
        for name, child in module.named_modules():
            self._follow(name, child)

    def _follow(self, name: str, module: nn.Module) -> None:
        def enter(*_: Any) -> None:
            self._running.append(name)

        def leave(*_: Any) -> None:
            self._running.pop()

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and record what it read and made."""
        for tensor in _tensors([args, kwargs]):
            place = _storage(tensor)
            if place not in self._known and place not in self._made:
                self.strange.setdefault(place, Sighting(tensor, self._running[-1]))
        results = func(*args, **(kwargs or {}))
        for tensor in _tensors(results):
            if _storage(tensor) not in self.strange:
                self._made.setdefault(_storage(tensor), Sighting(tensor.detach(), self._running[-1]))
        return results

    @contextmanager
    def again(self) -> Iterator[None]:
        """Watch a second pass and keep as strange only what it reads again: an array of numpy's is new each time."""
        first, self.strange = self.strange, {}
        with self:
            yield
        self.strange = {place: first[place] for place in self.strange if place in first}

    def where_made(self, tensor: Tensor) -> str | None:
        """Return the path of the module in whose forward a tensor's memory was made; None if it was there before."""
        sighting = self._made.get(_storage(tensor))
        return sighting.place if sighting else None

    def where_read(self, tensor: Tensor) -> str:
        """Return the path of the module in whose forward a tensor from outside was first read; "" for the root."""
        sighting = self.strange.get(_storage(tensor))
        return sighting.place if sighting else ""


def share_memory(tensor: Tensor, others: Iterable[Tensor]) -> bool:
    """Say whether a tensor has its storage in common with one of the others."""
    return _storage(tensor) in set(map(_storage, others))


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else id(tensor)
