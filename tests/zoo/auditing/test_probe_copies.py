"""The probe runs on a copy: what is the caller's stays as it was, and what cannot be copied is said."""

import random
from types import MethodType

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zoo
from zoo.auditing.snapshots import hash_bytes
from zoo.errors import ZooError


class Layer(nn.Module):
    """A Linear, and what a function makes of the module and its output."""

    def __init__(self, then) -> None:
        super().__init__()
        self.linear, self.then = nn.Linear(4, 4), then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self, self.linear(x))


def test_attribute_beside_the_registry_is_the_parameter_in_the_copy_too() -> None:
    model = Layer(lambda layer, x: x @ layer.__dict__["alias"])
    model.__dict__["alias"] = model.linear.weight
    assert zoo.audit(model, batch=torch.ones(2, 4)).findings == ()


def test_computed_tensor_that_forward_writes_to_is_a_copy_too() -> None:
    def write(layer: Layer, x: Tensor) -> Tensor:
        with torch.no_grad():
            layer.cache[0].zero_()
        return x

    model = Layer(write)
    model.cache = [model.linear(torch.ones(1, 4))]
    kept = model.cache[0].detach().clone()
    assert zoo.audit(model, batch=torch.ones(2, 4)).findings == ()
    assert torch.equal(model.cache[0], kept)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
def test_scripted_child_that_cannot_be_copied_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    with pytest.raises(ZooError, match="cannot copy a ScriptModule, and 1 is one: audit what it was made from"):
        zoo.audit(model, batch=torch.ones(2, 4))


class Restless(nn.Module):
    """Draws from every random stream, moves its statistics and writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x.mul_(random.random() + np.random.rand() + torch.rand(()).item())
        return self.dropout(self.norm(self.linear(x)))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_probe_leaves_everything_as_it_was(device) -> None:
    torch.manual_seed(0)
    model = Restless().to(device).eval()
    model(torch.ones(3, 4, device=device)).sum().backward()
    batch = torch.ones(3, 4, device=device)

    def look() -> dict[str, object]:
        tensors = model.state_dict() | {f"{name}.grad": p.grad for name, p in model.named_parameters()}
        streams = {
            "cpu": hash_bytes(torch.get_rng_state()),
            "cuda": hash_bytes(torch.cuda.get_rng_state()) if device == "cuda" else "",
            "python": random.getstate(),
            "numpy": str(np.random.get_state()),
        }
        hashes = {name: hash_bytes(tensor) for name, tensor in tensors.items()}
        hooks = [len(module._forward_hooks) for module in model.modules()]
        return (
            hashes | streams | {"calls": model.calls, "train": model.training, "x": hash_bytes(batch), "hooks": hooks}
        )

    before = look()
    assert zoo.audit(model, batch=batch).findings == ()
    assert look() == before


def test_failing_probe_leaves_the_random_streams_too() -> None:
    def fail(*_: object) -> Tensor:
        torch.rand(1), np.random.rand(), random.random()
        raise KeyError("mask")

    model = Layer(fail)
    streams = hash_bytes(torch.get_rng_state()), str(np.random.get_state()), random.getstate()
    with pytest.raises(ZooError, match=r"the audit's probe failed on a batch of shape \[\(2, 4\)\]: 'mask'"):
        zoo.audit(model, batch=torch.ones(2, 4))
    assert streams == (hash_bytes(torch.get_rng_state()), str(np.random.get_state()), random.getstate())


def test_model_that_cannot_be_copied_says_so() -> None:
    model = nn.Linear(4, 4)
    model.stream = (number for number in range(3))
    with pytest.raises(ZooError, match="needs a copy of the model, which cannot be made: cannot pickle 'generator'"):
        zoo.audit(model, batch=torch.ones(2, 4))


@pytest.mark.parametrize("kind", [dict, tuple, list])
def test_batch_that_forward_writes_to_is_left_as_it_was(kind) -> None:
    class Writes(nn.Linear):
        def forward(self, images: Tensor | list[Tensor]) -> Tensor:
            x = images[0] if isinstance(images, list) else images
            return super().forward(x.mul_(2))

    x = torch.ones(2, 4)
    batch = {dict: {"images": x}, tuple: (x,), list: ([x],)}[kind]
    assert zoo.audit(Writes(4, 4), batch=batch).findings == ()
    assert torch.equal(x, torch.ones(2, 4))


def test_forward_that_is_bound_to_the_model_itself_is_a_warning_and_a_method_is_none() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    layer, inner = model[1], model[1].forward
    for forward in (lambda x: nn.functional.linear(x, layer.weight, layer.bias), lambda x: inner(x) * 2):
        layer.forward = forward
        (finding,) = zoo.audit(model, batch=torch.ones(2, 4)).findings
        assert (finding.severity, finding.check, finding.tensor) == ("warning", "probe", "1.weight")
        assert "a closure over a module or its forward), so nothing was tried; make it a method" in finding.message
        assert layer.weight.grad is None
    layer.forward = MethodType(lambda self, x: nn.functional.linear(x, self.weight, self.bias), layer)
    assert zoo.audit(model, batch=torch.ones(2, 4)).findings == ()
