from typing import Any

import torch
from torch import Tensor

from zoo.auditing.graph import iter_leaves


def leaf() -> Tensor:
    return torch.ones(2, requires_grad=True)


def found(*outputs: Tensor) -> list[int]:
    return sorted(map(id, iter_leaves(outputs)))


def test_every_leaf_of_every_output_is_yielded_once() -> None:
    a, b, c = leaf(), leaf(), leaf()
    assert found(a * b, (b + c).sum(), a.exp()) == sorted(map(id, [a, b, c]))


def test_output_that_is_a_leaf_is_yielded_once_however_it_is_reached() -> None:
    a = leaf()
    assert found(a) == found(a, a) == found(a, a * 2) == found(a * 2, a) == [id(a)]


def test_tensors_without_a_graph_lead_nowhere() -> None:
    assert found(torch.ones(2), leaf().detach(), leaf() * 2 > 1) == []


def test_graph_with_more_paths_than_nodes_is_walked_node_by_node() -> None:
    a = x = leaf()
    for _ in range(64):  # 2**64 paths
        x = x + x
    assert found(x) == [id(a)]


def test_tensor_that_a_function_of_ones_own_keeps_is_no_leaf() -> None:
    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.variable = inner
            return x.clone()

        @staticmethod
        def backward(_: Any, gradient: Tensor) -> Tensor:
            return gradient

    a = leaf()
    inner = a * 2
    assert found(Keeps.apply(inner)) == [id(a)]
