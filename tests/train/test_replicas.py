import re

import pytest
import timm
import torch
from accelerate import Accelerator
from torch import nn

from train.errors import ReplicaMismatch, WorldSizeError
from train.replicas import check_replicas


class Toy(nn.Module):
    """One tensor of each kind the check has to tell apart."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.to_q = nn.Parameter(torch.randn(4, 4))
        self.to_k = nn.Parameter(torch.randn(4, 4))
        self.frozen = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.head = nn.Linear(4, 3)
        self.head.bias.data.zero_()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("cache", torch.arange(3.0), persistent=False)
        self.register_buffer("nothing", torch.empty(0, 2))
        self.low = nn.Parameter(torch.randn(3).to(torch.bfloat16))
        self.turned = nn.Parameter(torch.randn(2, 3).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x @ self.to_q @ self.to_k @ self.frozen)
        return self.head(x) + self.low.float().sum() + self.turned.sum()


def flip_bit(tensor: torch.Tensor, bit: int = 0) -> None:
    tensor.data.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << bit)


def plant_bit(model: Toy) -> None:
    flip_bit(model.head.weight)


def plant_swap(model: Toy) -> None:
    model.to_q.data, model.to_k.data = model.to_k.data, model.to_q.data


def plant_shape(model: Toy) -> None:
    model.frozen = nn.Parameter(torch.randn(5, 4), requires_grad=False)


def plant_dtype(model: Toy) -> None:
    model.low = nn.Parameter(model.low.detach().half())


def plant_buffer(model: Toy) -> None:
    model.norm.running_var[1] += 1


def plant_integral_buffer(model: Toy) -> None:
    model.norm.num_batches_tracked += 1


def plant_mask(model: Toy) -> None:
    model.mask[2] = False


def plant_transient_buffer(model: Toy) -> None:
    model.cache[0] = 7


def plant_persistence(model: Toy) -> None:
    model.register_buffer("cache", model.cache, persistent=True)


def plant_requires_grad(model: Toy) -> None:
    model.to_k.requires_grad_(False)


def plant_order(model: Toy) -> None:
    model._parameters["to_q"] = model._parameters.pop("to_q")


def plant_missing(model: Toy) -> None:
    model.head.bias = None


def plant_extra(model: Toy) -> None:
    model.gamma = nn.Parameter(torch.ones(4))


def plant_minus_zero(model: Toy) -> None:
    model.head.bias.data[0].neg_()


def plant_tie(model: Toy) -> None:
    model.to_k = model.to_q


def plant_meta(model: Toy) -> None:
    model.to_q = nn.Parameter(torch.empty(4, 4, device="meta"))


PLANTS = {
    plant_bit: r"head\.weight: bytes differ: \w{8} on rank 0, \w{8} on rank 1; largest difference \S+ at \[0, 0\]",
    plant_swap: r"to_q: bytes differ.*; swapped with to_k on rank 1; largest difference ",
    plant_shape: r"frozen: shape is \(4, 4\) on rank 0, \(5, 4\) on rank 1$",
    plant_dtype: r"low: dtype is bfloat16 on rank 0, float16 on rank 1$",
    plant_buffer: r"norm\.running_var: bytes differ.*; largest difference 1 at \[1\]: 2 on rank 1, 1 on rank 0$",
    plant_integral_buffer: r"norm\.num_batches_tracked: bytes differ.*; largest difference 1: 1 on rank 1, 0 on rank 0",
    plant_mask: r"mask: bytes differ.*; largest difference 1 at \[2\]: 1 on rank 0, 0 on rank 1$",
    plant_transient_buffer: r"cache: bytes differ",
    plant_persistence: r"cache: kind is non-persistent buffer on rank 0, persistent buffer on rank 1$",
    plant_requires_grad: r"to_k: requires_grad is True on rank 0, False on rank 1$",
    plant_order: r"order of registration differs \(DDP pairs by position\): place 0 is to_q on rank 0, to_k on rank 1$",
    plant_missing: r"head\.bias: missing on rank 1, there on rank 0$",
    plant_extra: r"gamma: missing on rank 0, there on rank 1$",
    plant_minus_zero: r"head\.bias: bytes differ.*; the values are equal: the sign of a zero, or bits of a NaN",
    plant_tie: r"to_k: tie is its own on rank 0, the same tensor as to_q on rank 1$",
    plant_meta: r"to_q is on the meta device.*\(rank 1 of 2, replica check before wrap\)$",
}


def said(check, *arguments, **options) -> str:
    try:
        return f"passed: {check(*arguments, **options)}"
    except ReplicaMismatch as error:
        return str(error)


def plant_all(accelerator: Accelerator) -> dict[str, str]:
    """Run the check once for each plant, which the last rank alone gets; then the cases with a story of their own."""
    odd = accelerator.process_index == accelerator.num_processes - 1
    heard = {}
    for plant in PLANTS:
        model = Toy()
        if odd:
            plant(model)
        heard[plant.__name__] = said(check_replicas, model, accelerator)
    model = Toy()
    heard["equal"] = said(check_replicas, model, accelerator)
    model.head.weight.data[0, 0] = float("nan")
    heard["nan"] = said(check_replicas, model, accelerator)

    for buffers in ("all", "integral", "none"):
        model = Toy()
        model.norm.running_mean += accelerator.process_index
        heard[f"float buffer, {buffers}"] = said(check_replicas, model, accelerator, buffers=buffers)
        model = Toy()
        model.norm.num_batches_tracked += accelerator.process_index
        heard[f"integral buffer, {buffers}"] = said(check_replicas, model, accelerator, buffers=buffers)

    torch.manual_seed(7 + accelerator.process_index)
    seeded = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=3
    )
    heard["seeded, before wrap"] = said(check_replicas, seeded, accelerator)
    wrapped = accelerator.prepare(seeded)
    heard["seeded, after wrap"] = said(check_replicas, wrapped, accelerator, when="after wrap")
    if odd:
        flip_bit(seeded.head.weight)
    heard["drift in the wrapper"] = said(check_replicas, wrapped, accelerator, when="after step 1")
    return heard


def plant_one_of_three(accelerator: Accelerator) -> str:
    model = Toy()
    if accelerator.process_index == 1:
        flip_bit(model.to_q)
    return said(check_replicas, model, accelerator)


@pytest.fixture(scope="module")
def heard(run_ranks) -> dict[str, str]:
    """What two real ranks said of every case; both said the same."""
    first, second = run_ranks(plant_all)
    assert not first.error, first.traceback
    assert first.value.keys() == second.value.keys()
    for case, message in first.value.items():
        if not message.startswith("passed"):  # a report's milliseconds are a rank's own
            assert second.value[case] == message
    return first.value


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS)
def test_two_ranks_name_the_planted_fault(heard, plant) -> None:
    lines = heard[plant.__name__].splitlines()
    assert "replica check before wrap" in lines[0]
    assert re.search(PLANTS[plant], heard[plant.__name__], flags=re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["equal", "nan"])
def test_equal_bits_pass_even_where_they_are_nan(heard, case) -> None:
    assert heard[case].startswith("passed: replica check before wrap: 2 ranks are equal, tensors=15 bytes=")


@pytest.mark.slow
def test_swap_is_named_from_both_sides_and_counted(heard) -> None:
    message = heard["plant_swap"]
    assert "2 of 15 tensors differ" in message
    assert "to_k: " in message
    assert "swapped with to_q on rank 1" in message


@pytest.mark.slow
def test_buffers_option_leaves_out_running_statistics(heard) -> None:
    assert {case: heard[case].startswith("passed") for case in heard if "buffer, " in case} == {
        "float buffer, all": False,
        "float buffer, integral": True,
        "float buffer, none": True,
        "integral buffer, all": False,
        "integral buffer, integral": False,
        "integral buffer, none": True,
    }


@pytest.mark.slow
def test_model_built_under_a_seed_for_each_rank_is_caught_before_the_wrap_only(heard) -> None:
    message = heard["seeded, before wrap"]
    assert "replica check before wrap: rank 1 of 2 differs from rank 0" in message
    assert "blocks.0.attn.qkv.weight: bytes differ" in message
    assert "... and " in message
    assert heard["seeded, after wrap"].startswith("passed: replica check after wrap")


@pytest.mark.slow
def test_drift_inside_the_wrapper_is_named_without_its_prefix(heard) -> None:
    assert "replica check after step 1: rank 1 of 2" in heard["drift in the wrapper"]
    assert "\n  head.weight: bytes differ" in heard["drift in the wrapper"]


@pytest.mark.slow
def test_three_ranks_name_the_odd_one(run_ranks) -> None:
    messages = {outcome.value for outcome in run_ranks(plant_one_of_three, world_size=3)}
    assert len(messages) == 1
    message = messages.pop()
    assert "rank 1 of 3 differs from ranks 0, 2, 1 of 15 tensors differ" in message
    assert "on ranks 0, 2," in message


def test_world_of_one_passes_without_reading_bytes() -> None:
    report = check_replicas(Toy(), Accelerator(cpu=True))
    assert (report.world_size, report.tensors) == (1, 15)
    assert "one rank, nothing to compare" in str(report)


def test_process_that_was_launched_as_one_of_two_and_is_alone_is_told(monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 1
    with pytest.raises(WorldSizeError, match=r"the launcher started 2 processes, but rank \S sees 1"):
        check_replicas(Toy(), accelerator)
