import copy
from pathlib import Path

import pytest
import torch
from timm.layers.norm_act import BatchNormAct2d
from torch import Tensor, nn

import zoo
from zoo.card import ModelCard, Preprocessing
from zoo.still import is_still, iter_running

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
NORMS = {
    "BatchNorm2d": lambda: nn.BatchNorm2d(4),
    "BatchNorm2d, cumulative": lambda: nn.BatchNorm2d(4, momentum=None),
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(4),
    "InstanceNorm2d": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    "BatchNormAct2d": lambda: BatchNormAct2d(4),
}


class Net(nn.Module):
    """A convolution, a norm and a head; the norm has seen other images than it will see."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 1), norm, nn.Linear(4, 2)
        with torch.no_grad():
            self.norm.running_mean.copy_(torch.tensor([0.5, -1.0, 2.0, 0.0]))
            self.norm.running_var.copy_(torch.tensor([2.0, 0.5, 1.0, 4.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).mean((2, 3)))


@pytest.fixture(params=NORMS)
def net(request) -> Net:
    torch.manual_seed(0)
    return Net(NORMS[request.param]())


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith(STATISTICS)}


def moved(model: nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {name for name, buffer in statistics(model).items() if not torch.equal(buffer, before[name])}


def train(model: nn.Module, epochs: int = 2) -> None:
    """Take steps as a loop does: train mode at every epoch, evaluation between."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(learning, lr=0.1) if learning else None
    for _ in range(epochs):
        model.train()
        loss = model(torch.randn(8, 3, 8, 8) * 3 + 1).square().sum()
        if optimizer:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        model(torch.randn(2, 3, 8, 8))


def test_frozen_norm_keeps_its_statistics_and_answers_by_them(net) -> None:
    before = statistics(net)
    zoo.freeze(net, "norm")
    train(net)
    assert moved(net, before) == set()
    images = torch.randn(4, 3, 8, 8)
    expected = net.eval()(images)
    assert torch.equal(net.train()(images), expected)
    assert net.training
    assert net.head.training


def test_norm_that_is_not_frozen_moves(net) -> None:
    """The fault that the others look for: frozen parameters alone leave the statistics moving."""
    before = statistics(net)
    net.norm.requires_grad_(False)
    train(net)
    assert moved(net, before) >= {"norm.running_mean", "norm.running_var"}


@pytest.mark.parametrize("patterns", [["norm.weight", "norm.bias"], "*norm*", "all but head", "all"])
def test_all_its_parameters_frozen_by_any_patterns_hold_a_norm(patterns) -> None:
    net = Net(nn.BatchNorm2d(4))
    zoo.freeze(net, patterns)
    assert is_still(net.norm)


def test_half_frozen_norm_runs_until_the_other_half_is(net) -> None:
    zoo.freeze(net, "norm.weight")
    assert not is_still(net.norm)
    zoo.freeze(net, "norm.bias")
    assert is_still(net.norm)


def test_unfreeze_lets_it_run_again_in_the_models_mode(net) -> None:
    zoo.freeze(net.train(), "all")
    assert not net.norm.training
    zoo.unfreeze(net, "norm.bias")
    assert net.norm.training
    assert "train" not in vars(net.norm)
    before = statistics(net)
    train(net)
    assert moved(net, before) >= {"norm.running_mean", "norm.running_var"}
    zoo.freeze(net.eval(), "norm")
    zoo.unfreeze(net, "norm")
    assert not net.norm.training


def test_norm_given_by_itself_comes_back_in_the_mode_it_was_told() -> None:
    norm = nn.BatchNorm2d(4)
    zoo.freeze(norm, "all")
    assert not norm.train().training
    zoo.unfreeze(norm, "all")
    assert norm.training
    zoo.freeze(norm, "all")
    norm.eval()
    zoo.unfreeze(norm, "all")
    assert not norm.training


@pytest.mark.parametrize("patterns", ["norm", "all", "all but head", "*"])
def test_norm_without_parameters_is_held_where_a_pattern_names_it(patterns) -> None:
    net = Net(nn.BatchNorm2d(4, affine=False))
    before = statistics(net)
    zoo.freeze(net, patterns)
    train(net)
    assert moved(net, before) == set()
    zoo.unfreeze(net, "norm")
    train(net)
    assert moved(net, before) == {f"norm.{name}" for name in STATISTICS}


@pytest.mark.parametrize("patterns", ["conv", "*.weight", "all but norm"])
def test_norm_without_parameters_runs_where_none_does(patterns) -> None:
    net = Net(nn.BatchNorm2d(4, affine=False))
    before = statistics(net)
    zoo.freeze(net, patterns)
    train(net)
    assert moved(net, before) == {f"norm.{name}" for name in STATISTICS}


def test_norm_without_statistics_is_none_to_hold() -> None:
    model = nn.Sequential(nn.BatchNorm2d(4, track_running_stats=False), nn.LayerNorm(4))
    zoo.freeze(model, "all")
    assert iter_running(model) == {}
    assert model.train()[0].training


def test_copy_is_held_and_is_its_own(net) -> None:
    zoo.freeze(net, "norm")
    other = copy.deepcopy(net)
    before = statistics(other)
    train(other)
    assert moved(other, before) == set()
    zoo.unfreeze(net, "norm")
    assert is_still(other.norm)
    assert not other.train().norm.training
    assert net.train().norm.training


def test_freeze_through_a_part_is_taken_back_by_the_whole() -> None:
    model = nn.Sequential(Net(nn.BatchNorm2d(4)))
    zoo.freeze(model[0], "norm")
    assert not model.train()[0].norm.training
    zoo.unfreeze(model, "0.norm")
    assert model[0].norm.training


def test_children_of_a_held_norm_follow_the_mode() -> None:
    """timm's BatchNormAct2d holds a dropout and an activation, which train on."""
    norm = BatchNormAct2d(4, drop_layer=nn.Dropout)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), norm)
    zoo.freeze(model, "1")
    model.train()
    assert (norm.training, norm.drop.training) == (False, True)


def test_pattern_that_names_nothing_holds_nothing() -> None:
    net = Net(nn.BatchNorm2d(4))
    with pytest.raises(zoo.ZooError, match="unknown pattern 'nrm', did you mean 'norm'"):
        zoo.freeze(net, ["norm", "nrm"])
    assert not is_still(net.norm)
    assert net.norm.training


def test_audit_finds_nothing_in_a_model_with_held_norms(net) -> None:
    zoo.freeze(net, "norm")
    report = zoo.audit(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert not report.errors, report


def test_timms_hybrid_of_blocks_and_batch_norms_stays_still_frozen_below_its_last_stage() -> None:
    model = zoo.create_model("mobilevit_xxs", "parameter", seed=0, num_classes=2)
    held = {path for path in iter_running(model) if path.startswith(("stem.", "stages.0.", "stages.1."))}
    zoo.freeze(model, ["stem", "stages.0-1"])
    before = statistics(model)
    images = torch.randn(4, 3, 64, 64)
    for _ in range(2):
        model.train()
        model(images).sum().backward()
    still = {name.rpartition(".")[0] for name in before.keys() - moved(model, before)}
    assert still == held
    assert held
    assert len(held) < len(iter_running(model))


@pytest.mark.slow
def test_compiled_and_exported_models_hold_as_the_model_does() -> None:
    net = Net(nn.BatchNorm2d(4))
    zoo.freeze(net, "norm")
    before, images = statistics(net), torch.randn(4, 3, 8, 8)
    expected = net.train()(images)
    compiled = torch.compile(net, backend="eager")
    torch.testing.assert_close(compiled.train()(images), expected)
    exported = torch.export.export(net.train(), (images,)).module()
    torch.testing.assert_close(exported(images), expected)
    assert moved(net, before) == set()


def test_bundle_saved_amid_training_leaves_a_norm_held_and_brings_its_statistics_back(tmp_path: Path) -> None:
    model = zoo.create_model("mobilevit_xxs", "parameter", seed=0, num_classes=2)
    zoo.freeze(model, "stem")
    torch.nn.init.uniform_(model.stem.bn.running_mean)
    before = statistics(model.stem)
    size = {"size": (64, 64), "crop_pct": 1.0, "interpolation": "bicubic", "mean": (0.5,) * 3, "std": (0.5,) * 3}
    card = ModelCard(
        backbone="mobilevit_xxs", attention="parameter", class_names=("a", "b"), preprocessing=Preprocessing(**size)
    )
    model.train()
    zoo.save_bundle(model, card, tmp_path / "bundle")
    assert model.training
    model(torch.randn(4, 3, 64, 64))
    assert moved(model.stem, before) == set()
    loaded, _ = zoo.load_bundle(tmp_path / "bundle")
    assert moved(loaded.stem, before) == set()
