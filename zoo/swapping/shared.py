"""Carry ties through a swap: what was one tensor under several names stays one, or the swap is refused."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import chain

from torch import Tensor, nn

from zoo.errors import SwapError
from zoo.projections import part_parameter, put_part_parameter
from zoo.swapping.exchange import Exchange, Source

_Key = tuple[object, ...]


class SharedParts:
    """Which projections of a swap hold tensors in common, and what they become.

    Two projections stay tied if each tensor that they share becomes one tensor of the same parts in both. A tie to a
    place outside of the swap, or of q alone where q, k and v become one tensor, cannot be kept.

    Args:
        model: The model, before the swap.
        exchanges: Those that will be carried out.

    Raises:
        SwapError: For a tie that the swap would break; names both ends.
    """

    def __init__(self, model: nn.Module, exchanges: Sequence[Exchange]) -> None:
        names = _Names(model)
        leaving = {
            f"{exchange.place.name}.{leaf}"
            for exchange in exchanges
            for leaf, _ in exchange.old.named_parameters(remove_duplicate=False)
        }
        keys: dict[Source, set[_Key]] = defaultdict(set)
        uses: Counter[_Key] = Counter()
        for exchange in exchanges:
            for leaf, tensor in exchange.old.named_parameters(prefix=exchange.place.name):
                outside = [other for other in names.of_memory(tensor) if other not in leaving]
                if outside or names.is_aliased(tensor):
                    others = [other for other in names.of_memory(tensor) if other != leaf]
                    raise _broken(leaf, ", ".join(outside or others))
            for kind, parts in exchange.groups:
                key = _key(exchange, kind, parts)
                uses[key] += 1
                for source in exchange.sources(kind, parts):
                    if source is not None:
                        keys[source].add(key)
        for source, becoming in keys.items():
            if len(becoming) > 1 or any(_repeats(key, source) for key in becoming):
                first, *others = names.of_id(source[0])
                raise _broken(first, ", ".join(others))
        self._common = {key for key, count in uses.items() if count > 1}
        self._made: dict[_Key, nn.Parameter] = {}

    def tie(self, exchange: Exchange, new: nn.Module) -> None:
        """Let `new`, about to take its place, hold the tensors that it has in common with those before it."""
        for kind, parts in exchange.groups:
            key = _key(exchange, kind, parts)
            target = part_parameter(new, parts[0], kind)
            if key in self._common and target is not None:
                common = self._made.setdefault(key, target)
                for part in parts:
                    put_part_parameter(new, part, kind, common)


class _Names:
    """The names of a model's tensors, by the memory that they start at: two Parameters over one storage are a tie."""

    def __init__(self, model: nn.Module) -> None:
        self._names: dict[int, list[str]] = defaultdict(list)
        self._ids: dict[int, set[int]] = defaultdict(set)
        tensors = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        for name, tensor in tensors:
            self._names[_memory(tensor)].append(name)
            self._ids[_memory(tensor)].add(id(tensor))

    def of_id(self, identity: int) -> list[str]:
        return next(self._names[memory] for memory, ids in self._ids.items() if identity in ids)

    def of_memory(self, tensor: Tensor) -> list[str]:
        return self._names[_memory(tensor)]

    def is_aliased(self, tensor: Tensor) -> bool:
        return len(self._ids[_memory(tensor)]) > 1


def _memory(tensor: Tensor) -> int:
    return tensor.data_ptr() or id(tensor)  # no memory on the meta device


def _key(exchange: Exchange, kind: str, parts: tuple[str, ...]) -> _Key:
    """Return what two Parameters-to-be have in common if they are one: kind, sources, widths and order."""
    widths = tuple(exchange.layout.sizes[part] for part in parts)
    order = exchange.layout.num_heads if len(parts) > 1 else 1
    return kind, exchange.sources(kind, parts), widths, order


def _repeats(key: _Key, source: Source) -> bool:
    """Say whether one tensor is several parts of a tensor-to-be, as when q and k are tied and would be joined."""
    _, sources, _, _ = key
    assert isinstance(sources, tuple)
    return sources.count(source) > 1


def _broken(name: str, others: str) -> SwapError:
    return SwapError(f"{name} is tied to {others}, and the swap cannot keep the two as one tensor; untie them first")
