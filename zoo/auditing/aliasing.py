"""Which parameters are one: tied names, parameters over one memory, and equal copies that look tied and are not."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from zoo.auditing.findings import Finding
from zoo.auditing.snapshots import first_names, readable_values

_MANY = 2  # from so many tensors on, two modules that share or copy them all are named instead


def check_ties(model: nn.Module) -> Iterator[Finding]:
    """Note tied names; find distinct parameters over one memory, and parameters that are equal copies."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    owners = first_names(parameters)
    ties = [(owners[id(tensor)], name) for name, tensor in parameters.items() if owners[id(tensor)] != name]
    for kept, name, count in _gather(ties):
        what = f"shares {count} tensors with {kept}, each" if count else f"is one tensor with {kept},"
        yield Finding("tie", "note", name, f"{what} counted once")
    own = {name: tensor for name, tensor in model.named_parameters() if _has_memory(tensor)}
    shared = list(_find_overlaps(own))
    for name, other in shared:
        message = (
            f"is another nn.Parameter over {name}'s memory: the optimizer would step it twice; assign one to the other"
        )
        yield Finding("tie", "warning", other, message)
    buffers = {name: tensor for name, tensor in model.named_buffers() if _has_memory(tensor)}
    for name, other in _find_overlaps(own | buffers):
        if name in own and other in buffers:
            message = f"is a buffer over the memory of the parameter {name} and changes with it: register a .clone()"
            yield Finding("tie", "warning", other, message)
    copies = [pair for pair in _find_copies(own) if pair not in shared]
    for kept, name, count in _gather(copies):
        what = f"is an equal copy of {kept}, not tied to it"
        what += f", in {count} tensors: they will part" if count else ": two tensors that will part"
        yield Finding("tie", "note", name, what)


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0


def _find_overlaps(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield pairs of names, in the model's order, of different tensors that have elements in common."""
    # one address space holds the host's memory and CUDA's, so that a tensor's device need not be asked
    spans = sorted((*_span(tensor), place) for place, tensor in enumerate(tensors.values()))
    names = list(tensors)
    furthest = (0, 0, 0)  # the span seen so far that ends last
    for start, end, place in spans:
        other_start, other_end, other_place = furthest
        if end > other_end:
            furthest = (start, end, place)
        if start < other_end:
            one, other = names[min(place, other_place)], names[max(place, other_place)]
            # views that interleave may lie within each other and have nothing in common
            if start == other_start or (_is_dense(tensors[one]) and _is_dense(tensors[other])):
                yield one, other


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first and one past the last byte that the tensor touches."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _is_dense(tensor: Tensor) -> bool:
    start, end = _span(tensor)
    return end - start == tensor.numel() * tensor.element_size()


def _find_copies(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield the names of each first and its equal, but for constant tensors, as zeros and ones are by design."""
    alike: dict[tuple[object, ...], list[str]] = {}
    for name, tensor in tensors.items():
        start = tuple(readable_values(tensor).flatten()[:8].tolist())  # so that few are compared in full
        alike.setdefault((tensor.dtype, tensor.device, start), []).append(name)
    for names in alike.values():
        firsts: list[tuple[str, Tensor]] = []
        for name in names if len(names) > 1 else ():
            tensor = readable_values(tensors[name])
            if bool((tensor == tensor.flatten()[0]).all()):
                continue
            found = next((first for first, other in firsts if torch.equal(tensor, other)), None)
            if found is None:
                firsts.append((name, tensor))
            else:
                yield found, name


def _gather(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str, int]]:
    """Gather pairs like ("a.0.w", "a.1.w"), ("a.0.b", "a.1.b") into ("a.0", "a.1", 2); a lone pair has count 0."""
    gathered: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for kept, name in pairs:
        one, other = kept.split("."), name.split(".")
        while len(one) > 1 and len(other) > 1 and one[-1] == other[-1]:
            one, other = one[:-1], other[:-1]
        gathered.setdefault((".".join(one), ".".join(other)), []).append((kept, name))
    for modules, members in gathered.items():
        if len(members) >= _MANY:
            yield *modules, len(members)
        else:
            yield *members[0], 0
