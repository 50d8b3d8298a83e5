"""Every tensor of a model, and of its optimizer, by name: what replicas must hold alike, and a hash of its bytes."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from train.equality.host import iter_bytes
from train.equality.mismatches import Row, Table
from train.errors import ReplicaMismatch

Buffers = Literal["all", "drift", "integral", "none"]


@dataclass(slots=True)
class Item:
    """One name that replicas must agree on.

    Attributes:
        name: The tensor's name in the bare model, or "optimizer: ..." for what the optimizer holds.
        kind: "parameter", "persistent buffer", "non-persistent buffer", "running statistic", "optimizer state" or
            "optimizer setting".
        tensor: The tensor; None for a plain number or text.
        value: That number or text, as JSON; "" for a tensor.
        tied_to: The first name that holds the very same tensor, or None if this is the first.
    """

    name: str
    kind: str
    tensor: Tensor | None
    value: str = ""
    tied_to: str | None = None

    @property
    def hashed(self) -> bool:
        """Whether its bytes are to be read here: once for a tied tensor, and not for a running statistic."""
        return self.tensor is not None and self.tied_to is None and self.kind != "running statistic"


def list_items(model: nn.Module, *, buffers: Buffers = "all", optimizer: Optimizer | None = None) -> list[Item]:
    """List parameters in order of registration, then buffers, then what the optimizer holds.

    Args:
        model: A bare model.
        buffers: Which buffers to list, as for `check_replicas`.
        optimizer: Its optimizer, bare or as Accelerate wraps it.

    Raises:
        ReplicaMismatch: If a tensor has no bytes of its own to compare: on the meta device, sparse, lazy or sharded.
    """
    parameters, held = list[Item](), list[Item]()
    training = model.training
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        parameters += [
            Item(prefix + name, "parameter", tensor)
            for name, tensor in module._parameters.items()
            if tensor is not None
        ]
        if buffers != "none" and module._buffers:
            held += _list_buffers(module, prefix, buffers, training=training)
    items = parameters + held
    if optimizer is not None:
        items += _list_optimizer(optimizer, {id(item.tensor): item.name for item in reversed(parameters)})
    first: dict[int, str] = {}
    for item in items:
        if item.tensor is not None:
            _check_readable(item.name, item.tensor)
            owner = first.setdefault(id(item.tensor), item.name)
            item.tied_to = owner if owner != item.name else None
    return items


def digest_items(items: Sequence[Item]) -> bytes:
    """Hash names, kinds, shapes, dtypes, ties, values and all bytes, in one pass over the memory."""
    hasher = xxhash.xxh3_128(repr([_describe(item) for item in items]).encode())
    for data in iter_bytes(item.tensor for item in items if item.tensor is not None and item.hashed):
        hasher.update(data)
    return hasher.digest()


def fingerprint(
    model: nn.Module, *, buffers: Buffers = "all", optimizer: Optimizer | None = None, hashed: bool = True
) -> Table:
    """List what `list_items` lists, each tensor with a hash of its own bytes.

    Args:
        model: A bare model.
        buffers: Which buffers to list, as for `check_replicas`.
        optimizer: Its optimizer, or None to leave it out.
        hashed: Whether to read the bytes; without, every digest is "".

    Raises:
        ReplicaMismatch: If a tensor has no bytes of its own to compare.
    """
    return tabulate(list_items(model, buffers=buffers, optimizer=optimizer), hashed=hashed)


def tabulate(items: Iterable[Item], *, hashed: bool = True) -> Table:
    """Make a row of each item, with a hash of its bytes where it is to be read."""
    table: Table = []
    for item in items:
        _, _, shape, dtype, requires_grad, tied_to, _ = _describe(item)
        tensor, value, digest = item.tensor, item.value, ""
        if tensor is not None and hashed and item.hashed:
            digest = xxhash.xxh3_128_hexdigest(next(iter_bytes([tensor])))
            if item.kind == "optimizer state" and tensor.numel() == 1:
                value = str(tensor.item())  # a step counter: what it says tells more than a hash
        table.append(
            Row(
                name=item.name,
                kind=item.kind,
                shape=shape,
                dtype=dtype,
                requires_grad=requires_grad,
                tied_to=tied_to,
                digest=digest,
                bytes=0 if tensor is None else tensor.numel() * tensor.element_size(),
                value=value,
            )
        )
    return table


def _describe(item: Item) -> tuple[str, str, tuple[int, ...], str, bool, str | None, str]:
    tensor = item.tensor
    if tensor is None:
        return item.name, item.kind, (), "", False, None, item.value
    dtype = str(tensor.dtype)[len("torch.") :]
    return item.name, item.kind, tuple(tensor.shape), dtype, tensor.requires_grad, item.tied_to, ""


def _check_readable(name: str, tensor: Tensor) -> None:
    if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
        if is_lazy(tensor):
            raise ReplicaMismatch(f"{name} is lazy: it has no bytes to compare; run one batch through the model first")
        if hasattr(tensor, "placements"):
            raise ReplicaMismatch(
                f"{name} is sharded over the ranks ({type(tensor).__name__}): there are no replicas to compare; check "
                "before it is sharded"
            )
    if tensor.is_meta or tensor.layout is not torch.strided:
        where = "on the meta device" if tensor.is_meta else f"of layout {tensor.layout}"
        raise ReplicaMismatch(f"{name} is {where}: it has no bytes to compare; give it values first")


def _list_buffers(module: nn.Module, prefix: str, buffers: Buffers, *, training: bool) -> Iterator[Item]:
    # A norm that alone is in eval mode is held still: its statistics are as good as constants.
    gathers = hasattr(module, "momentum") and (module.training or not training)
    for name, tensor in module._buffers.items():
        if tensor is None:
            continue
        floating = tensor.is_floating_point() or tensor.is_complex()
        if buffers == "drift" and floating and gathers and name.startswith("running_"):
            yield Item(prefix + name, "running statistic", tensor)
        elif buffers != "integral" or not floating:
            lasting = "non-persistent" if name in module._non_persistent_buffers_set else "persistent"
            yield Item(prefix + name, f"{lasting} buffer", tensor)


def _list_optimizer(optimizer: Optimizer, names: Mapping[int, str]) -> Iterator[Item]:
    """List settings of each group, then the states; a parameter that is not the model's goes by its place."""
    inner = getattr(optimizer, "optimizer", optimizer)  # inside Accelerate's wrapper
    for place, group in enumerate(inner.param_groups):
        owners = [names.get(id(tensor), f"group {place}[{i}]") for i, tensor in enumerate(group["params"])]
        listed = f"{len(owners)} parameters, {xxhash.xxh3_64_hexdigest(' '.join(owners).encode())[:8]}"
        for key, value in group.items():
            held = listed if key == "params" else value
            yield from _unfold(f"optimizer: group {place} / {key}", "optimizer setting", held)
        for owner, tensor in zip(owners, group["params"], strict=True):
            for key, value in inner.state.get(tensor, {}).items():
                yield from _unfold(f"optimizer: {owner} / {key}", "optimizer state", value)


def _unfold(name: str, kind: str, value: Any) -> Iterator[Item]:
    if isinstance(value, Tensor):
        yield Item(name, kind, value)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _unfold(f"{name}.{key}", kind, inner)
    elif isinstance(value, list | tuple) and any(isinstance(inner, Tensor) for inner in value):
        for place, inner in enumerate(value):
            yield from _unfold(f"{name}.{place}", kind, inner)
    elif value is None or isinstance(value, bool | int | float | str | list | tuple):
        yield Item(name, kind, None, json.dumps(value, default=str))
    # else a function or an object of the optimizer's own: nothing that can be compared
