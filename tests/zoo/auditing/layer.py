"""A layer whose forward each test of the probe bends in its own way."""

from collections.abc import Callable

from torch import Tensor, nn


class Layer(nn.Module):
    """A Linear, and what a function makes of the module and its output."""

    def __init__(self, then: Callable[["Layer", Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.then = nn.Linear(4, 4), then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self, self.linear(x))
