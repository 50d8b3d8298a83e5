"""Walk autograd's graph back to the tensors that a result was computed from."""

from collections.abc import Iterable, Iterator

from torch import Tensor


def iter_leaves(outputs: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield every leaf that a backward pass from these outputs would hand a gradient to, each once.

    Args:
        outputs: Tensors of any shape; those without a graph lead nowhere, a leaf that requires a gradient to itself.
    """
    yielded: set[int] = set()
    seen = set()
    nodes = []
    for output in outputs:
        if output.grad_fn is not None:
            nodes.append(output.grad_fn)
        elif output.requires_grad and id(output) not in yielded:
            yielded.add(id(output))
            yield output
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # only autograd's AccumulateGrad has one
        if isinstance(leaf, Tensor) and leaf.is_leaf and id(leaf) not in yielded:
            yielded.add(id(leaf))
            yield leaf
        nodes += [following for following, _ in node.next_functions if following is not None]
