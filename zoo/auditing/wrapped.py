"""A DDP wrapper and the model inside it: does the one still reduce the gradients of the other?"""

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zoo.auditing.findings import Finding
from zoo.auditing.snapshots import bare_model

_AGAIN = "DDP was built before this change: wrap again"


def check_wrapper(model: nn.Module) -> Iterator[Finding]:
    """Find what changed in a model since it was wrapped for DDP, which reduces what was trainable at that time.

    Each of three ways to differ is one finding, which names the first tensor and counts the others.

    Args:
        model: A model, bare or wrapped; nothing is said of one without DDP.
    """
    wrapper = _find_ddp(model)
    if wrapper is None or not hasattr(wrapper, "reducer"):  # one that is told to ignore every parameter has none
        return
    ignored = {
        id(tensor)
        for name, tensor in wrapper.module.named_parameters(remove_duplicate=False)
        if name in wrapper.parameters_to_ignore
    }
    parameters = {name: tensor for name, tensor in bare_model(wrapper).named_parameters() if id(tensor) not in ignored}
    reduced = _list_reduced(wrapper)
    held, present = set(map(id, reduced)), set(map(id, parameters.values()))
    known = set(map(id, wrapper._module_parameters))
    missed = {name: tensor for name, tensor in parameters.items() if tensor.requires_grad and id(tensor) not in held}
    new = [name for name, tensor in missed.items() if id(tensor) not in known]
    if new:
        yield _tell(new, "not there when the model was wrapped, so that each rank trains its own")
    freed = [name for name in missed if name not in new]
    if freed:
        yield _tell(freed, "frozen when the model was wrapped, so that each rank trains its own")
    frozen = [name for name, tensor in parameters.items() if id(tensor) in held and not tensor.requires_grad]
    if frozen and not wrapper.find_unused_parameters:
        yield _tell(frozen, "trainable when the model was wrapped, so that DDP waits for a gradient that never comes")
    gone = [str(tuple(tensor.shape)) for tensor in reduced if id(tensor) not in present | ignored]
    if gone and not new:
        message = (
            f"holds {len(gone)} parameters that are not the model's any more, the first of shape {gone[0]}, and waits "
            f"for their gradients. {_AGAIN}"
        )
        yield Finding("wrapper", "error", "", message)


def _list_reduced(wrapper: DistributedDataParallel) -> list[Tensor]:
    """Return the parameters whose gradients the wrapper waits for and reduces; a moment's zeros of their size."""
    for module in wrapper.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            # such a table's bucket cannot be listed before it has a gradient: what was trainable is taken to be as now
            return [tensor for tensor in wrapper._module_parameters if tensor.requires_grad]
    return [tensor for bucket in wrapper.reducer._get_zeros_like_grad_buckets() for tensor in bucket.parameters()]


def _tell(names: list[str], what: str) -> Finding:
    count = len(names) - 1
    others = f" and {count} other{'s' * (count > 1)} were" if count else " was"
    return Finding("wrapper", "error", names[0], f"this{others} {what}. {_AGAIN}")


def _find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DDP wrapper itself, or the one that a compiled model holds; None without one."""
    while not isinstance(model, DistributedDataParallel):
        compiled = dict(model.named_children()).get("_orig_mod")
        if compiled is None:
            return None
        model = compiled
    return model
