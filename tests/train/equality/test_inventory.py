import pytest
import torch
from torch import Tensor, nn

from train.equality.inventory import Item, digest_items, fingerprint, list_items
from train.errors import ReplicaMismatch


def settle(model: nn.Module, make, steps: int = 2) -> torch.optim.Optimizer:
    """Take some steps, after which an optimizer holds what it will hold."""
    optimizer = make(model.parameters())
    for _ in range(steps):

        def close() -> Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(3, 4)).square().sum()
            loss.backward()
            return loss

        optimizer.step(close)
    return optimizer


def test_bytes_tell_the_sign_of_zero_and_keep_nan_equal() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.tensor([0.0, float("nan")]))
    before = fingerprint(model)
    assert fingerprint(model) == before
    model.weight.data[0] = -0.0
    assert fingerprint(model) != before


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.bool, torch.int8, torch.int64, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_any_dtype_and_shape_has_a_digest(dtype, shape) -> None:
    model = nn.Module()
    model.register_buffer("x", torch.ones(shape).to(dtype))
    (row,) = fingerprint(model)
    assert (row.shape, len(row.digest), row.bytes) == (shape, 32, model.x.numel() * model.x.element_size())


def test_memory_layout_does_not_count() -> None:
    model = nn.Conv2d(3, 4, 3)
    before = fingerprint(model)
    assert fingerprint(model.to(memory_format=torch.channels_last)) == before


OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"weight / exp_avg", "weight / exp_avg_sq", "weight / step", "bias / step"}),
    "SGD": (lambda tensors: torch.optim.SGD(tensors, lr=0.1, momentum=0.9), {"weight / momentum_buffer"}),
    "Adagrad": (torch.optim.Adagrad, {"weight / sum"}),
    "Adafactor": (torch.optim.Adafactor, {"weight / row_var", "weight / col_var", "bias / variance"}),
    "LBFGS": (torch.optim.LBFGS, {"weight / func_evals", "weight / old_dirs.0", "weight / prev_loss"}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_of_any_optimizer_are_listed_by_parameter(name) -> None:
    make, states = OPTIMIZERS[name]
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = settle(model, make)
    names = {item.name: item for item in list_items(model, optimizer=optimizer)}
    assert {f"optimizer: {state}" for state in states} <= set(names)
    assert names["optimizer: group 0 / lr"].value
    before = digest_items(list_items(model, optimizer=optimizer))
    for state in states:
        item = names[f"optimizer: {state}"]
        if item.tensor is not None:
            item.tensor.add_(1)
            assert digest_items(list_items(model, optimizer=optimizer)) != before
            item.tensor.sub_(1)


def test_settings_count_and_functions_among_them_do_not() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    optimizer.param_groups[0] |= {"note": "a", "hook": print, "betas": (0.9, torch.tensor(0.99))}
    items = {item.name.removeprefix("optimizer: group 0 / "): item for item in list_items(model, optimizer=optimizer)}
    assert items["params"].value.startswith('"2 parameters, ')
    assert items["note"].value == '"a"'
    assert items["lr"].tensor is not None
    assert items["betas.1"].tensor is not None
    assert "hook" not in items
    before = digest_items(list(items.values()))
    optimizer.param_groups[0]["note"] = "b"
    assert digest_items(list_items(model, optimizer=optimizer)) != before


def test_parameter_that_is_not_the_models_goes_by_its_place() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(1))], momentum=0.9)
    optimizer.param_groups[0]["params"][2].grad = torch.ones(1)
    optimizer.step()
    assert "optimizer: group 0[2] / momentum_buffer" in {item.name for item in list_items(model, optimizer=optimizer)}


def test_step_counter_says_its_number_in_the_table() -> None:
    model = nn.Linear(4, 2)
    optimizer = settle(model, torch.optim.AdamW, steps=3)
    rows = {row.name: row for row in fingerprint(model, optimizer=optimizer)}
    assert rows["optimizer: bias / step"].value == "3.0"


class Running(nn.Module):
    """A norm of one's own, as timm's EvoNorm: it gathers statistics, and is no BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.momentum = 0.1
        self.register_buffer("running_var", torch.ones(2))
        self.register_buffer("scale", torch.ones(2))


def kinds(model: nn.Module, buffers) -> dict[str, str]:
    return {
        item.name: item.kind
        for item in list_items(model, buffers=buffers)
        if "buffer" in item.kind or "run" in item.kind
    }


def test_drift_sets_apart_running_statistics_alone() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), Running(), nn.BatchNorm1d(2))
    model[2].eval()  # held still
    found = kinds(model, "drift")
    assert {name for name, kind in found.items() if kind == "running statistic"} == {
        "0.running_mean",
        "0.running_var",
        "1.running_var",
    }
    assert set(found) == set(kinds(model, "all"))
    assert "running statistic" not in kinds(model, "all").values()
    assert set(kinds(model, "integral")) == {"0.num_batches_tracked", "2.num_batches_tracked"}
    assert kinds(model, "none") == {}
    model.eval()  # as a whole: nothing is known of who is held
    assert kinds(model, "drift")["2.running_mean"] == "running statistic"


class Sharded(Tensor):
    """Looks like what sharding makes of a parameter."""

    placements = ()


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (lambda model: model.register_buffer("x", torch.ones(2, 2).to_sparse()), "x is of layout torch.sparse_coo"),
        (lambda model: model.register_buffer("x", torch.ones(2, device="meta")), "x is on the meta device"),
        (lambda model: model.register_buffer("x", torch.ones(2).as_subclass(Sharded)), "x is sharded over the ranks"),
        (lambda model: model.register_parameter("x", nn.UninitializedParameter()), "x is lazy: it has no bytes"),
    ],
)
def test_what_has_no_bytes_of_its_own_is_refused_by_name(plant, said) -> None:
    model = nn.Module()
    plant(model)
    with pytest.raises(ReplicaMismatch, match=said):
        list_items(model)


def test_digest_tells_names_and_places_of_equal_bytes() -> None:
    ones = torch.ones(2)
    digests = {
        digest_items([Item(name, kind, tensor)])
        for name, kind, tensor in (
            ("a", "parameter", ones),
            ("b", "parameter", ones),
            ("a", "persistent buffer", ones),
            ("a", "parameter", ones[None]),
            ("a", "parameter", ones.view(torch.int32)),
        )
    }
    assert len(digests) == 5
