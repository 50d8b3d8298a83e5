"""Find tensors and modules that a model holds where nn.Module does not look: attributes, containers, closures."""

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import partial
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from zoo.auditing.findings import Finding, Severity
from zoo.auditing.graph import iter_leaves

LOST = "not moved, trained, saved or synchronised"
# nn.Module's own attributes: registries, hooks, flags
_INTERNALS = frozenset(vars(nn.Module()))
_NOT_ENTERED = (Optimizer, Dataset, ModuleType, type, str, bytes, bool, int, float, type(None))
# what a module computed and keeps for the next pass, as timm's attention_bias_cache['cuda:0'] in eval mode
_CACHE = re.compile(r"(^|\.)\w*_cache(\[.*\])?$")


class Held(NamedTuple):
    """A tensor or module found outside of the registries.

    Attributes:
        name: The path to it, as "blocks.0.layers[1]".
        value: It.
        in_object: Whether an object of some other class holds it, not a container that stands for its items.
    """

    name: str
    value: Tensor | nn.Module
    in_object: bool


def check_registered(model: nn.Module) -> Iterator[Finding]:
    """Find float tensors and modules that the model holds and nn.Module does not know of.

    They are not moved by `.to`, not trained, not saved and, under DDP, not synchronised. Looked into are attributes
    of modules and of their classes, containers, dataclasses, other objects, partials, functions' closures and defaults.
    Tensors without a gradient under a name that ends in "_cache" are left out.
    """
    known = {id(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    for name, value, in_object in iter_unregistered(model):
        if isinstance(value, nn.Module):
            finding = _judge_module(name, value, known)
        elif not value.requires_grad and _CACHE.search(name):
            finding = None
        elif value.grad_fn is not None:
            finding = _judge_computed(name, value, known)
        elif value.requires_grad or not in_object:
            finding = _judge_tensor(name, value)
        else:
            finding = None
        if finding:
            yield finding


def _judge_tensor(name: str, tensor: Tensor) -> Finding | None:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    kind = "an nn.Parameter in a plain container" if isinstance(tensor, nn.Parameter) else "a plain tensor"
    message = (
        f"is {kind} of shape {tuple(tensor.shape)}, neither parameter nor buffer of the model: {LOST}; "
        "make it an nn.Parameter (many: nn.ParameterList) or register_buffer it (a cache: persistent=False)"
    )
    return Finding("registered", "error", name, message)


def _judge_computed(name: str, tensor: Tensor, known: set[int]) -> Finding | None:
    """Judge a tensor with a graph: one computed from the model, as weight_norm's weight is, is no fault."""
    leaves = list(iter_leaves([tensor]))
    if any(id(leaf) in known for leaf in leaves):
        return None
    shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)
    message = (
        f"was computed once from tensors that the model does not hold (shape {shapes}), so it is no parameter: {LOST}; "
        "make the nn.Parameter last, of values already scaled, cast and moved: nn.Parameter(0.02 * torch.randn(...))"
    )
    return Finding("registered", "error", name, message)


def _judge_module(name: str, module: nn.Module, known: set[int]) -> Finding | None:
    hidden = [tensor for tensor in [*module.parameters(), *module.buffers()] if id(tensor) not in known]
    if not hidden:
        return None
    severity: Severity = "error" if any(tensor.requires_grad for tensor in hidden) else "warning"
    message = (
        f"is a {type(module).__name__} in a plain container, with {len(hidden)} tensors: {LOST}; "
        "use nn.ModuleList or nn.ModuleDict"
    )
    return Finding("registered", severity, name, message)


def iter_unregistered(model: nn.Module) -> Iterator[Held]:
    """Yield every tensor and module that a model holds outside of its registries, each once, in the model's order."""
    known = {id(value) for value in [*model.parameters(), *model.buffers(), *model.modules()]}
    classes: set[type] = set()
    for path, module in model.named_modules():
        computed = {
            getattr(hook, attribute, None)  # what old weight_norm, spectral_norm and pruning compute before forward
            for hook in getattr(module, "_forward_pre_hooks", {}).values()
            for attribute in ("name", "_tensor_name")
        }
        fresh = [base for base in type(module).__mro__ if base not in classes]
        classes.update(fresh)
        for name, value in [*vars(module).items(), *_class_attributes(fresh)]:
            if name not in _INTERNALS and name not in computed:
                yield from _walk(f"{path}.{name}".lstrip("."), value, known, in_object=False)


def _class_attributes(classes: Iterable[type]) -> Iterator[tuple[str, Any]]:
    for cls in classes:
        for name, value in vars(cls).items():
            if isinstance(value, Tensor | nn.Module | Mapping | list | tuple) and not name.startswith("__"):
                yield name, value


def _walk(name: str, value: Any, known: set[int], *, in_object: bool) -> Iterator[Held]:
    if isinstance(value, _NOT_ENTERED) or id(value) in known:
        return
    known.add(id(value))
    if isinstance(value, Tensor | nn.Module):
        yield Held(name, value, in_object)
        return
    items = _items(name, value)
    if items is None:
        if in_object:  # objects of objects (a trainer's, a logger's) lead out of the model
            return
        items, in_object = _attributes(name, value), not (is_dataclass(value) or isinstance(value, SimpleNamespace))
    for place, item in items:
        yield from _walk(place, item, known, in_object=in_object)


def _items(name: str, value: Any) -> Iterator[tuple[str, Any]] | None:
    """Return what a container or a function holds, each with its path; None for an object of another kind."""
    if isinstance(value, Mapping):
        return ((f"{name}[{key!r}]", item) for key, item in value.items())
    if isinstance(value, list | tuple | deque | set | frozenset):
        return ((f"{name}[{index}]", item) for index, item in enumerate(value))
    if isinstance(value, partial):
        held = {"func": value.func, "args": value.args, "keywords": value.keywords}
    elif isinstance(value, MethodType):
        held = {"__self__": value.__self__}
    elif isinstance(value, FunctionType):
        held = {
            "__closure__": _closure(value),
            "__defaults__": value.__defaults__,
            "__kwdefaults__": value.__kwdefaults__,
        }
    else:
        return None
    return ((f"{name}.{key}", item) for key, item in held.items())


def _closure(function: FunctionType) -> dict[str, Any]:
    held = {}
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            held[variable] = cell.cell_contents
        except ValueError:  # a variable that its function has not set yet
            continue
    return held


def _attributes(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    slots = {slot for cls in type(value).__mro__ for slot in _as_tuple(vars(cls).get("__slots__", ()))}
    own = vars(value) if type(value).__dictoffset__ else ()  # asked by its type, for a __getattr__ may load things
    for attribute in [*own, *sorted(slots)]:
        try:
            yield f"{name}.{attribute}", object.__getattribute__(value, attribute)
        except AttributeError:  # a slot without a value
            continue


def _as_tuple(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)
