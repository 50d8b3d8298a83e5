"""Freeze and unfreeze parameters by pattern, and remember on the model which were frozen on purpose.

A norm with running statistics (BatchNorm and its kin) whose parameters are all frozen is still: in train mode too it
normalises by the statistics that it has, and leaves them as they are. One without parameters is still if a pattern
names it, or a path above it.
"""

from collections.abc import Iterable

from torch import nn

from zoo.auditing.arguments import check_model
from zoo.auditing.snapshots import bare_model
from zoo.errors import ZooError
from zoo.patterns import select
from zoo.still import hold_still, iter_running, let_run

_RECORD = "_frozen_on_purpose"  # a set of parameter names, a plain attribute of the model given to `freeze`


def freeze(model: nn.Module, patterns: str | Iterable[str]) -> tuple[str, ...]:
    """Switch requires_grad off, in place, for every parameter that a pattern names; all patterns or none.

    A tied parameter is one tensor: naming it once freezes it under all its names. Dropout goes on; running statistics
    stop where their module is frozen whole.

    Args:
        model: Any module, not wrapped. It remembers the names, so that the audit can tell a freeze from an accident.
        patterns: Names, paths, globs, ranges of blocks, or "all but ...", as `zoo.patterns` lists them:
            "patch_embed", "blocks.0-5", "blocks.*.attn", ["cls_token", "*.bias"], "all but head".

    Returns:
        The names that are frozen now by these patterns, in the model's order.

    Raises:
        UnknownNameError: If a pattern names nothing, or a block beyond the last; nothing is changed.
        ZooError: If a range is empty, "all but ..." stands beside another pattern, a pattern is no text, or the model
            is wrapped for DDP or DataParallel, or compiled; nothing is changed.
    """
    wanted = _check_arguments("freeze", model, patterns)
    parameters, running = dict(model.named_parameters(remove_duplicate=False)), iter_running(model)
    chosen = set(select({**parameters, **running}, wanted))
    names = tuple(name for name in parameters if name in chosen)
    for name in names:
        parameters[name].requires_grad_(False)  # noqa: FBT003
    setattr(model, _RECORD, _read_record(model) | set(names))
    for path, module in running.items():
        own = [name for name, _ in module.named_parameters(prefix=path, recurse=False)]
        touched = not chosen.isdisjoint(own or [path])
        if touched and not any(parameters[name].requires_grad for name in own):
            hold_still(module)
    return names


def unfreeze(model: nn.Module, patterns: str | Iterable[str]) -> tuple[str, ...]:
    """Switch requires_grad on, in place, for every parameter that a pattern names; all patterns or none.

    Running statistics move again where a parameter of their module learns again. Make the optimizer and wrap the model
    for DDP after it, not before: both read requires_grad once.

    Args:
        model: Any module, not wrapped.
        patterns: As for `freeze`.

    Returns:
        The names that are trainable now by these patterns, in the model's order.

    Raises:
        UnknownNameError: As `freeze`; nothing is changed.
        ZooError: As `freeze`, or if a parameter of integers is named, which cannot be trained; nothing is changed.
    """
    wanted = _check_arguments("unfreeze", model, patterns)
    parameters, running = dict(model.named_parameters(remove_duplicate=False)), iter_running(model)
    chosen = set(select({**parameters, **running}, wanted))
    names = tuple(name for name in parameters if name in chosen)
    for name in names:
        if not (parameters[name].is_floating_point() or parameters[name].is_complex()):
            raise ZooError(f"{name} is of dtype {parameters[name].dtype} and cannot be trained; name others")
    for name in names:
        parameters[name].requires_grad_(True)  # noqa: FBT003
    for path, module in model.named_modules():
        if hasattr(module, _RECORD):
            kept = {name for name in _read_record(module) if f"{path}.{name}".lstrip(".") not in chosen}
            setattr(module, _RECORD, kept)
    for path, module in running.items():
        own = [name for name, _ in module.named_parameters(prefix=path, recurse=False)]
        if not chosen.isdisjoint(own or [path]):
            let_run(module, training=None if module is model else model.training)
    return names


def _check_arguments(verb: str, model: nn.Module, patterns: str | Iterable[str]) -> list[str]:
    """Return the patterns as a list, or raise for what is no pattern, no module, or wrapped."""
    check_model(model, verb)
    wrapper = model if bare_model(model) is not model else None
    for name, module in [("", wrapper), *model.named_modules()]:
        if module is wrapper is not None or isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise ZooError(
                f"{verb} before the model is wrapped: {name or 'the model'} is a wrapper, {type(module).__name__}: its "
                f"names have a prefix, and it read requires_grad before; {verb} the model inside, then wrap it"
            )
    wanted = [patterns] if isinstance(patterns, str) or not isinstance(patterns, Iterable) else list(patterns)
    for pattern in wanted:
        if not isinstance(pattern, str):
            raise ZooError(f"{verb} wants patterns, texts such as 'head' or 'blocks.0-5', got {pattern!r:.60}")
    return wanted


def find_frozen(model: nn.Module) -> frozenset[str]:
    """Return the parameter names that were frozen on purpose, through this model or through a module of it."""
    return frozenset(
        f"{path}.{name}".lstrip(".") for path, module in model.named_modules() for name in _read_record(module)
    )


def check_trainable(model: nn.Module) -> None:
    """Raise if a model has nothing to train, in the same words in a world of any size and on any device.

    Raises:
        ZooError: If no parameter requires a gradient; says how many were frozen on purpose.
    """
    message = find_nothing_trainable(model)
    if message:
        raise ZooError(message)


def find_nothing_trainable(model: nn.Module) -> str:
    """Return the sentence for a model that has nothing to train, or "" if it has."""
    parameters = list(model.parameters())
    if any(parameter.requires_grad for parameter in parameters):
        return ""
    named = find_frozen(model) & {name for name, _ in model.named_parameters()}
    return (
        f"no trainable parameters: all {len(parameters)} are frozen, {len(named)} of them by a freeze pattern; "
        "freeze less, or unfreeze the head"
    )


def _read_record(module: nn.Module) -> set[str]:
    """Return the names recorded on one module, as they are now.

    A swap stores a projection under other names, with requires_grad carried over: a recorded name that is gone speaks
    for the frozen parameters of the module that it was in.
    """
    record: set[str] = getattr(module, _RECORD, set())
    if not record:
        return set()
    parameters = dict(module.named_parameters(remove_duplicate=False))
    gone = tuple(name.rpartition(".")[0] + "." for name in record - parameters.keys() if "." in name)
    heirs = {name for name, tensor in parameters.items() if gone and name.startswith(gone) and not tensor.requires_grad}
    return (record & parameters.keys()) | heirs
