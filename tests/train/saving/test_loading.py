from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.train.tiny import build_tiny, same, weights
from train.errors import CheckpointError
from train.run import Run
from train.saving import loading
from train.saving.checkpoint import MODEL, OPTIMIZER, optimizer_tensors, write_checkpoint
from train.saving.loading import (
    Layout,
    broadcast,
    check_model,
    check_optimizer,
    describe,
    fetch,
    load_model,
    load_optimizer,
)
from train.saving.resume import describe_state
from train.step import train_step


def tied(config, steps: int = 0) -> Run:
    """Build a run with a pair of tied matrices in its model, and take some steps."""
    run = build_tiny(config, wrapped=False)
    run.bare.blocks[1].mlp.fc1.weight = run.bare.blocks[0].mlp.fc1.weight
    run.optimizer = torch.optim.AdamW(run.bare.parameters(), lr=1e-2)
    for _, batches in zip(range(steps), run.batches(), strict=False):
        train_step(run, batches)
    return run


@pytest.fixture
def config(tiny):
    return tiny(model__timm_kwargs={"depth": 2})


@pytest.fixture
def path(config, here) -> Path:
    """A checkpoint after two steps."""
    run = tied(config, steps=2)
    write_checkpoint(here / "step-00000002", describe_state(run), run.bare, run.optimizer, {})
    return here / "step-00000002"


def test_weights_and_optimizer_state_come_back_bit_for_bit(config, tiny, path):
    run, fresh = tied(config, steps=2), tied(tiny(model__timm_kwargs={"depth": 2}, seed=1))
    assert not same(weights(fresh), weights(run))
    load_model(fresh.bare, fetch(path / MODEL, fresh.accelerator, lambda _: None))
    load_optimizer(fresh.bare, fresh.optimizer, fetch(path / OPTIMIZER, fresh.accelerator, lambda _: None))
    assert same(weights(fresh), weights(run))
    assert fresh.bare.blocks[1].mlp.fc1.weight is fresh.bare.blocks[0].mlp.fc1.weight
    saved = optimizer_tensors(run.bare, run.optimizer)
    assert {name.rpartition("/")[2] for name in saved} == {"step", "exp_avg", "exp_avg_sq"}
    assert same(optimizer_tensors(fresh.bare, fresh.optimizer), saved)


def layout_of(tensors: dict[str, Tensor]) -> Layout:
    return {name: describe(tensor) for name, tensor in tensors.items()}


def lose(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lose("head.bias"), r"model\.safetensors: does not fit the model: head\.bias is missing"),
        (put("spare", torch.zeros(1)), r"spare is not the model's"),
        (put("head.bias", torch.zeros(4)), r"head\.bias is float32 \(4,\), the model's is float32 \(3,\)"),
        (put("head.bias", torch.zeros(3).half()), r"head\.bias is float16 \(3,\), the model's is float32 \(3,\)"),
        (put("blocks.1.mlp.fc1.weight", torch.zeros(1)), r"blocks\.1\.mlp\.fc1\.weight is not the model's"),
    ],
)
def test_weights_that_do_not_fit_are_named(config, path, fault, said):
    run, tensors = tied(config), loading.read_tensors(path / MODEL)
    check_model(layout_of(tensors), path / MODEL, run.bare)
    fault(tensors)
    with pytest.raises(CheckpointError, match=said):
        check_model(layout_of(tensors), path / MODEL, run.bare)


def test_many_weights_that_do_not_fit_are_counted(config, path):
    with pytest.raises(CheckpointError, match=r"cls_token is missing; .*; and \d+ more$"):
        check_model({}, path / MODEL, tied(config).bare)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (put("spare/step", torch.zeros(())), r"optimizer\.safetensors: spare is no parameter that the optimizer holds"),
        (put("head.bias/exp_avg", torch.zeros(4)), r"head\.bias/exp_avg is of shape \[4\], head\.bias of \[3\]"),
        (
            lambda tensors: [tensors.pop(f"head.bias/{slot}") for slot in ("step", "exp_avg", "exp_avg_sq")],
            r"holds no state of head\.bias",
        ),
    ],
)
def test_optimizer_state_that_does_not_fit_is_named(config, path, fault, said):
    run, tensors = tied(config), loading.read_tensors(path / OPTIMIZER)
    check = partial(check_optimizer, path=path / OPTIMIZER, model=run.bare, optimizer=run.optimizer)
    check(layout_of(tensors))
    check({})  # no step was taken yet
    fault(tensors)
    with pytest.raises(CheckpointError, match=said):
        check(layout_of(tensors))


def test_state_of_a_parameter_that_is_frozen_now_is_refused(config, path):
    run = tied(config)
    run.optimizer = torch.optim.AdamW([run.bare.head.weight], lr=1e-2)
    with pytest.raises(CheckpointError, match="is no parameter that the optimizer holds"):
        check_optimizer(layout_of(loading.read_tensors(path / OPTIMIZER)), path / OPTIMIZER, run.bare, run.optimizer)


@pytest.mark.parametrize("content", [None, b"half"])
def test_file_that_cannot_be_read_is_named(here, content):
    if content is not None:
        (here / MODEL).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read \("):
        loading.read_tensors(here / MODEL)


ODD = {
    "nan": torch.tensor([float("nan"), -0.0, 0.0]),
    "half": torch.arange(6).half().view(2, 3),
    "bfloat": torch.randn(3, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "flags": torch.tensor([True, False]),
    "count": torch.tensor(7),
    "double": torch.tensor([0.1], dtype=torch.float64),
    "none": torch.zeros(0, 4),
    "turned": torch.arange(6.0).view(2, 3).t(),
}


def sent(accelerator, folder: str) -> dict[str, object]:
    """Receive a file that lies on rank 0's disk alone, and see it refused by one rank for all."""
    path = Path(folder) / f"rank{accelerator.process_index}" / "odd.safetensors"
    found = fetch(path, accelerator, lambda _: None)
    bits = {name: describe(found[name]) for name in ODD}
    equal = all(
        torch.equal(
            found[name].contiguous().view(-1).view(torch.uint8), ODD[name].contiguous().view(-1).view(torch.uint8)
        )
        for name in ODD
    )

    def refuse(_layout: Layout) -> None:
        if accelerator.process_index == 2:
            raise CheckpointError("not mine")

    try:
        fetch(path, accelerator, refuse)
    except CheckpointError as error:
        return {"bits": bits, "equal": equal, "said": str(error)}
    return {}


@pytest.mark.slow
def test_ranks_without_the_file_receive_it_bit_for_bit_or_all_refuse_it(run_ranks, tmp_path):
    (tmp_path / "rank0").mkdir()
    save_file({name: tensor.contiguous() for name, tensor in ODD.items()}, tmp_path / "rank0" / "odd.safetensors")
    for outcome in run_ranks(sent, world_size=3, folder=str(tmp_path)):
        assert not outcome.error, outcome.traceback
        assert outcome.value["equal"]
        assert outcome.value["bits"] == {name: list(describe(tensor)) for name, tensor in ODD.items()}
        assert outcome.value["said"].startswith("not mine (rank 2 of 3")


def test_one_rank_needs_no_broadcast(config):
    run = tied(config)
    assert broadcast(ODD, {}, run.accelerator) == ODD
