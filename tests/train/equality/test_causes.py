"""Each cause is planted by the mistake itself, in a training on two real ranks, and read off the check's message."""

import re

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from train.drift import DriftCheck
from train.equality.causes import find_causes, find_managed
from train.equality.inventory import Buffers, fingerprint
from train.equality.mismatches import find_differing
from train.errors import ReplicaMismatch
from train.replicas import check_replicas


class Net(nn.Module):
    """A norm that gathers statistics, a frozen layer, a buffer of floats, and a parameter that may come later."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 2)
        self.register_buffer("scale", torch.ones(3))
        self.gamma: nn.Parameter | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.norm(self.first(x)).relu()) * self.scale[0]
        return self.head(x if self.gamma is None else x * self.gamma)


class Loop:
    """Somebody's training loop; a test replaces the one line that holds the mistake."""

    def __init__(self, accelerator: Accelerator, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        self.accelerator, self.bare = accelerator, Net()
        trained = [tensor for tensor in self.bare.parameters() if tensor.requires_grad]
        self.model, self.optimizer = accelerator.prepare(self.bare, optimizer(trained, lr=1e-2))
        self.rank = accelerator.process_index
        self.data = torch.Generator().manual_seed(self.rank)
        self.drift = DriftCheck(self.model, accelerator, self.optimizer, every_steps=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def between(self, step: int) -> None:
        """What happens before a step."""

    def update(self, _step: int) -> None:
        self.optimizer.step()

    def after(self, step: int) -> None:
        """What happens after a step."""

    def run(self, steps: int = 3) -> str:
        try:
            for step in range(1, steps + 1):
                self.between(step)
                self.optimizer.zero_grad()
                self.accelerator.backward(self.forward(torch.randn(6, 4, generator=self.data)).square().sum())
                self.update(step)
                self.after(step)
                self.drift.after_step(step)
        except ReplicaMismatch as error:
            return str(error)
        return f"passed {self.drift.checks} checks"


class CallsInnerModule(Loop):
    def forward(self, x: Tensor) -> Tensor:
        return self.accelerator.unwrap_model(self.model)(x)


class StaysUnderNoSync(Loop):
    def run(self, steps: int = 3) -> str:
        with self.accelerator.no_sync(self.model):
            return super().run(steps)


class Unfreezes(Loop):
    def between(self, step: int) -> None:
        if step == 2:
            self.bare.frozen.requires_grad_(True)
            self.optimizer.optimizer.add_param_group({"params": list(self.bare.frozen.parameters())})


class AddsParameter(Loop):
    def between(self, step: int) -> None:
        if step == 2:
            self.bare.gamma = nn.Parameter(torch.ones(8))
            self.optimizer.optimizer.add_param_group({"params": [self.bare.gamma]})


class StepsOnMainProcessOnly(Loop):
    def update(self, _step: int) -> None:
        if _step < 3 or self.accelerator.is_main_process:
            self.optimizer.step()


class WritesBuffer(Loop):
    def after(self, step: int) -> None:
        if step == 2 and self.rank == 1:
            self.bare.scale[2] += 0.5


class WritesFrozen(Loop):
    def after(self, step: int) -> None:
        if step == 2 and self.rank == 1:
            self.bare.frozen.weight.data[3, 1] += 1


class DrawsAnew(Loop):
    def after(self, step: int) -> None:
        if step == 2 and self.rank == 1:
            self.bare.head.reset_parameters()


class FreezesOnOneRank(Loop):
    def after(self, step: int) -> None:
        if step == 2 and self.rank == 1:
            self.bare.head.bias.requires_grad_(False)
            self.drift._trainable = self.drift._look()  # past the wait for the other ranks, which drift's tests cover


class PoisonsOneRank(Loop):
    def after(self, step: int) -> None:
        if step == 2 and self.rank == 1:
            self.bare.head.bias.data[1] = float("nan")


class SchedulesOnOneRank(Loop):
    def after(self, step: int) -> None:
        if step == 2 and self.rank == 1:
            self.optimizer.param_groups[0]["lr"] *= 0.5


class LoadsStateOnOneRank(Loop):
    def after(self, step: int) -> None:
        if step == 2 and self.rank == 1:
            self.optimizer.state[self.bare.head.weight]["exp_avg"].zero_()


MISTAKES: dict[type[Loop], tuple[str, ...]] = {
    CallsInnerModule: (
        "replica check after step 1: rank 1 of 2 differs from rank 0",
        r"first\.weight: bytes differ.*; largest difference \S+ at \[\d, \d\]: \S+ on rank \d, \S+ on rank \d\n",
        r"optimizer: first\.weight / exp_avg: bytes differ.*; largest difference",
        "likely cause: 6 of 6 trainable parameters, or their .* no gradient was averaged, because the inner module was",
    ),
    StaysUnderNoSync: (r"no gradient was averaged, because .* or under no_sync\(\)",),
    Unfreezes: (
        "replica check after step 2",
        r"frozen\.bias: bytes differ",
        r"likely cause: unsynchronised: frozen\.weight, frozen\.bias were made trainable or added after the wrap",
    ),
    AddsParameter: ("likely cause: unsynchronised: gamma was made trainable or added after the wrap",),
    StepsOnMainProcessOnly: (
        "replica check after step 3",
        r"likely cause: rank 1 took 1 optimizer step fewer than rank 0 \(3 on rank 0, 2 on rank 1\)",
    ),
    WritesBuffer: (
        r"scale: bytes differ.*; largest difference 0\.5 at \[2\]: 1\.5 on rank 1, 1 on rank 0\n",
        "likely cause: buffer scale was updated on one rank",
    ),
    WritesFrozen: (
        r"frozen\.weight: bytes differ.*; largest difference 1 at \[3, 1\]",
        r"likely cause: frozen\.weight, frozen, was written to on one rank",
    ),
    DrawsAnew: (r"likely cause: head\.weight, head\.bias was written to on one rank, outside the optimizer's step",),
    FreezesOnOneRank: (
        r"head\.bias: requires_grad is True on rank 0, False on rank 1\n",
        r"likely cause: ranks changed the model each in its own way, at head\.bias: freeze",
    ),
    PoisonsOneRank: (
        r"head\.bias: bytes differ.*; NaN or Inf in 1 of 2 on rank 1, none on rank 0\n",
        r"likely cause: rank 1 alone holds NaN or Inf, in head\.bias",
    ),
    SchedulesOnOneRank: (
        r"optimizer: group 0 / lr: value is 0\.01 on rank 0, 0\.005 on rank 1\n",
        "likely cause: optimizer: group 0 / lr was set on one rank alone",
    ),
    LoadsStateOnOneRank: (
        r"optimizer: head\.weight / exp_avg: bytes differ.*; largest difference",
        r"likely cause: the optimizer's state, at optimizer: head\.weight / exp_avg, was loaded or changed on one rank",
    ),
}


def make_all(accelerator: Accelerator) -> dict[str, str]:
    heard = {mistake.__name__: mistake(accelerator).run() for mistake in (*MISTAKES, Loop)}
    heard["StepsOnMainProcessOnly, SGD"] = StepsOnMainProcessOnly(accelerator, torch.optim.SGD).run()
    heard["managed"] = " ".join(find_managed(Loop(accelerator).model) or ())
    loop = Unfreezes(accelerator)
    loop.between(2)
    heard["managed, unfrozen later"] = " ".join(find_managed(loop.model) or ())
    loop = Loop(accelerator)
    loop.run()
    heard["statistics"] = check_statistics(loop)
    return heard


def check_statistics(loop: Loop) -> str:
    """Say whether running statistics are apart after a forward, and whether the drift check leaves them equal."""
    loop.model(torch.randn(6, 4, generator=loop.data))
    heard: list[str] = []

    def check(buffers: Buffers) -> None:
        try:
            heard.append(str(check_replicas(loop.model, loop.accelerator, buffers=buffers)))
        except ReplicaMismatch as error:
            heard.append(str(error))

    check("all")
    check("drift")
    check("all")
    loop.bare.norm.eval()  # held still, so that a difference is a fault
    loop.bare.norm.running_mean += loop.rank
    check("drift")
    return "\n\n".join(heard)


@pytest.fixture(scope="module")
def heard(run_ranks) -> dict[str, str]:
    first, second = run_ranks(make_all)
    assert not first.error, first.traceback
    for case, message in first.value.items():
        if "ms=" not in message:
            assert second.value[case] == message
    return first.value


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_named(heard, mistake) -> None:
    for line in MISTAKES[mistake]:
        assert re.search(line, heard[mistake.__name__]), heard[mistake.__name__]


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [mistake for mistake in MISTAKES if mistake is not PoisonsOneRank])
def test_one_cause_is_named_for_one_mistake(heard, mistake) -> None:
    assert heard[mistake.__name__].count("likely cause") == 1


@pytest.mark.slow
def test_sound_loop_passes_with_statistics_that_differ_by_design(heard) -> None:
    assert heard["Loop"] == "passed 3 checks"
    apart, drift, shared, still = heard["statistics"].split("\n\n")
    assert "norm.running_mean: bytes differ" in apart
    assert "replica check before wrap: 2 ranks are equal" in drift
    assert "2 ranks are equal" in shared
    assert "norm.running_mean: bytes differ" in still


@pytest.mark.slow
def test_optimizer_without_a_counter_leaves_the_other_cause_open(heard) -> None:
    message = heard["StepsOnMainProcessOnly, SGD"]
    assert "or a rank took another number of steps" in message


@pytest.mark.slow
def test_ddp_tells_which_parameters_it_averages(heard) -> None:
    assert heard["managed"] == "first.weight first.bias norm.weight norm.bias head.weight head.bias"
    assert heard["managed, unfrozen later"] == heard["managed"]


def test_bare_model_that_has_been_trained_may_have_been_loaded_apart() -> None:
    tables = []
    for seed in (0, 1):
        net = Net()
        torch.manual_seed(seed)
        for tensor in net.parameters():
            tensor.data.normal_()
        optimizer = torch.optim.AdamW([tensor for tensor in net.parameters() if tensor.requires_grad])
        net(torch.ones(6, 4)).sum().backward()
        optimizer.step()
        tables.append(fingerprint(net, optimizer=optimizer))
    (cause, *others) = find_causes(tables, find_differing(tables), None)
    assert "or the ranks were built or loaded from different weights" in cause
    assert others == []


def test_parameters_that_differ_under_an_equal_optimizer_state_were_written_to() -> None:
    net = nn.Linear(4, 2)  # all there is to train, as in a linear probe
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(6, 4)).sum().backward()
    optimizer.step()
    tables = [fingerprint(net, optimizer=optimizer)]
    net.reset_parameters()
    tables.append(fingerprint(net, optimizer=optimizer))
    (cause,) = find_causes(tables, find_differing(tables), ["weight", "bias"])
    assert "weight, bias was written to on one rank, outside the optimizer's step" in cause


def test_bare_model_is_managed_by_nobody() -> None:
    assert find_managed(Net()) is None
