"""What a swap could not carry over, found before anything is changed: each check raises SwapError by name."""

from collections.abc import Iterable
from itertools import chain

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from zoo.errors import SwapError
from zoo.projections import Projection, part_parameter

# Known by name, so that none of their packages is imported here.
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "OptimizedModule")
_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def check_unwrapped(model: nn.Module) -> None:
    """Refuse a model that is wrapped or compiled, whole or in part: the wrapper would go on with the old parameters."""
    if not isinstance(model, nn.Module):
        raise SwapError(f"wanted is a model, an nn.Module; got {type(model).__name__}")
    for name, module in model.named_modules():
        if type(module).__name__ in _WRAPPERS:
            raise SwapError(
                f"{name or 'the model'}: {type(module).__name__} is a wrapper; swap the model before it is wrapped "
                "or compiled"
            )


def check_unhooked(name: str, module: nn.Module) -> None:
    """Refuse a module that somebody hung a hook or a forward of their own on."""
    extras = [kind for kind in _MODULE_HOOKS if getattr(module, kind)]
    if "forward" in vars(module):
        extras.append("a forward of its own")
    if extras:
        raise _loss(name, extras[0])


def check_plain(name: str, child: nn.Module, parts: Iterable[str]) -> None:
    """Refuse a projection that is or holds more than the weights and biases of its parts.

    Args:
        name: How the message calls it.
        child: What stands where a projection is expected.
        parts: The parts it should hold.

    Raises:
        SwapError: For another class than nn.Linear or a projection, a parametrization, a hook, a replaced forward,
            a further tensor, a tensor subclass, or parameters of more than one dtype or device.
    """
    for inner, module in child.named_modules(prefix=name):
        plain = type(module) is nn.Linear or isinstance(module, Projection)
        if is_parametrized(module) or (module is child and not plain):
            raise SwapError(f"{inner}: cannot swap {type(module).__name__}, only nn.Linear")
        check_unhooked(inner, module)
    _check_tensors(name, child, tuple(parts))


def _check_tensors(name: str, child: nn.Module, parts: tuple[str, ...]) -> None:
    stored = {id(part_parameter(child, part, kind)) for part in parts for kind in ("weight", "bias")}
    kinds = set()
    for leaf, tensor in chain(child.named_parameters(prefix=name), child.named_buffers(prefix=name)):
        if id(tensor) not in stored:
            raise _loss(leaf, "a tensor of its own")
        if type(tensor) is not nn.Parameter:
            raise _loss(leaf, f"the class {type(tensor).__name__}")
        extras = [kind for kind in _TENSOR_HOOKS if getattr(tensor, kind)]
        if extras:
            raise _loss(leaf, extras[0])
        kinds.add((str(tensor.dtype), str(tensor.device)))
    if len(kinds) > 1:
        raise SwapError(f"{name}: holds parameters of {sorted(kinds)}, a swap keeps one dtype and device")


def _loss(name: str, what: str) -> SwapError:
    words = what.strip("_").replace("_", " ")
    return SwapError(f"{name}: has {words} that a swap would lose; remove it first")
