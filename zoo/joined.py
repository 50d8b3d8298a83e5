"""A projection's weight, seen from outside as the one tensor of an nn.Linear: what is written there lands.

timm's init functions, its npz loader and people's scripts write to `attn.qkv.weight` in place. Where q, k and v are
stored apart, that attribute is made when it is asked for, and a write to an ordinary tensor would be lost.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from zoo.errors import ZooError

Read = Callable[[], Tensor]
Land = Callable[[Tensor], None]
# What changes the tensor object, not its values, and would be forgotten with it.
_LOST = frozenset(
    {"__set__", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"}
    | {"share_memory_", "set_", "resize_", "resize_as_", "t_", "transpose_", "swapaxes_", "swapdims_", "as_strided_"}
)


class Joined(Tensor):
    """What `Projection.weight` and `.bias` give: an in-place write to it, or to a view of it, reaches the parts.

    It holds the values of the moment it was read; a write begins with the present ones. Copies and results are ordinary
    tensors.

    Raises:
        ZooError: On what would be lost: another `requires_grad`, `data`, `grad`, shape or storage, or a hook.
        RuntimeError: torch's own, on a write that autograd would have to follow; use torch.no_grad().
    """

    _read: Read
    _land: Land
    _root: "Joined"

    @classmethod
    def of(cls, read: Read, land: Land, *, copied: bool) -> Tensor:
        """Return what `read` gives, (out, in) or (out,), with its writes passed to `land` as such a tensor.

        A stored Parameter comes back as it is, and so does anything but a plain tensor: what a compiler, an export or
        a tracer runs the model on.

        Raises:
            ZooError: If sharded parts (DTensor) were `copied` into one: of a tensor of that kind a write cannot land.
        """
        tensor = read()
        if torch.compiler.is_compiling() or torch._C._get_tracing_state():
            return tensor
        if copied and type(tensor).__name__ == "DTensor":
            raise ZooError(
                "a weight that is joined from sharded parts cannot be written to: draw or load the weights before "
                "sharding, and read the parts, which named_parameters() lists (to_q, to_k, to_v)"
            )
        if type(tensor) is not Tensor:
            return tensor
        joined = tensor.as_subclass(cls)
        joined._read, joined._land, joined._root = read, land, joined
        return joined

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run any function of torch's on the plain tensor, and see to it that a write lands."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.linear:  # what timm's own forwards call
                return func(*args, **kwargs)
            name = getattr(func, "__name__", "")
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Joined)]
            target = args[0] if args else kwargs.get("tensor")
            if name in _LOST and isinstance(target, Joined):
                raise _lost(name)
            written = list(_find_written(name, target, kwargs))
            fresh = {id(joined): joined._prepare() for joined in written}
            args, kwargs = tree_map(lambda leaf: fresh.get(id(leaf), leaf), (args, kwargs))
            versions = [joined._version for joined in given]
            result = func(*args, **kwargs)
            for joined, version in zip(given, versions, strict=True):
                if id(joined) in fresh or joined._version != version:
                    joined._write(fresh.get(id(joined), joined))
            back = {id(fresh[id(joined)]): joined for joined in written}
            return tree_map(lambda leaf: back[id(leaf)] if id(leaf) in back else _follow(leaf, given), result)

    def _prepare(self) -> Tensor:
        """Return what an in-place function is to work on.

        The whole tensor is laid out as nn.Linear's, so that a random draw fills it in the same order.
        """
        if self._is_whole():
            with torch.no_grad():
                present = self._read().clone(memory_format=torch.contiguous_format)
            return present.requires_grad_(self.requires_grad and torch.is_grad_enabled())
        if self.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("a view of a weight that requires grad is written in place: use torch.no_grad()")
        with torch.no_grad():
            self._root.copy_(self._read())
        return self

    @torch.no_grad()
    def _write(self, written: Tensor) -> None:
        if self._is_whole():
            self._root.copy_(written)
        self._land(self._root.as_subclass(Tensor))

    def _is_whole(self) -> bool:
        """Say whether this is all of the weight, as it is or as `.data`, not a part or another shape of it."""
        root = self._root
        return self.shape == root.shape and self.stride() == root.stride() and self.data_ptr() == root.data_ptr()

    def _is_copy(self) -> bool:
        return not _share(self, self._read())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return an ordinary leaf of the same values."""
        return self.detach().clone().requires_grad_(self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an ordinary tensor."""
        return self.detach().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _find_written(name: str, target: Any, kwargs: dict[str, Any]) -> Iterator[Joined]:
    """Yield what a function is about to write to: `uniform_`, `__iadd__`, `__setitem__`, `out=`."""
    in_place = name.startswith("__i") or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    for leaf in tree_leaves([target if in_place else None, kwargs.get("out")]):
        if isinstance(leaf, Joined):
            yield leaf


def _follow(result: Any, given: list[Joined]) -> Any:
    """Return a result that shares a joined tensor's memory as one that lands too; numpy's of a copy is read-only."""
    if isinstance(result, np.ndarray) and any(joined._is_copy() for joined in given):
        result.flags.writeable = False
    if type(result) is not Tensor:
        return result
    for joined in given:
        if _share(result, joined):
            view = result.as_subclass(Joined)
            view._read, view._land, view._root = joined._read, joined._land, joined._root
            return view
    return result


def _share(one: Tensor, other: Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _lost(name: str) -> ZooError:
    what = "setting an attribute of it" if name == "__set__" else name
    return ZooError(
        f"{what} would be lost on a weight that is joined from its parts: do it to the parts, which "
        "named_parameters() lists (to_q, to_k, to_v, projection), or to a clone()"
    )
