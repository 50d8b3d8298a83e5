import math
from itertools import pairwise

import pytest
import timm
import torch
from timm.optim import param_groups_weight_decay

import zoo
from tests.train.tiny import build_tiny, swapped, tiny_config, write_images
from train import step as step_module
from train.config import OptimizerConfig
from train.optim import build_optimizer, find_exempt, learning_rate, set_learning_rate
from train.step import train_step

SHAPE = {"peak": 0.1, "warmup_steps": 10, "total_steps": 100, "min_ratio": 0.05}


def build(backbone: str = "vit_tiny_patch16_224", attention: str = "parameter", **kwargs):
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 3}
    return zoo.create_model(backbone, attention, seed=0, **small | kwargs)


def test_warm_up_moves_at_once_and_reaches_the_peak():
    rates = [learning_rate(step, **SHAPE) for step in range(10)]
    assert rates == pytest.approx([0.01 * (step + 1) for step in range(10)])
    assert rates[0] > 0


def test_cosine_starts_at_the_peak_and_ends_at_the_least_ratio():
    assert learning_rate(10, **SHAPE) == 0.1
    assert learning_rate(55, **SHAPE) == pytest.approx(0.1 * (0.05 + 0.95 / 2))
    assert learning_rate(100, **SHAPE) == pytest.approx(0.005)
    assert learning_rate(10_000, **SHAPE) == pytest.approx(0.005)


def test_rate_falls_at_every_step_after_the_warm_up():
    rates = [learning_rate(step, **SHAPE) for step in range(10, 101)]
    assert all(later < earlier for earlier, later in pairwise(rates))


@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (0, 5), (5, 5), (1, 1)])
def test_rate_is_finite_and_positive_for_runs_without_warm_up_or_without_anything_else(warmup, total):
    rates = [learning_rate(k, peak=1.0, warmup_steps=warmup, total_steps=total, min_ratio=0.0) for k in range(total)]
    assert all(math.isfinite(rate) and rate > 0 for rate in rates)


def test_rate_is_set_in_every_group():
    optimizer = build_optimizer(build(), OptimizerConfig())
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


@pytest.mark.parametrize("attention", ["linear", "separate", "parameter"])
def test_every_parameter_is_in_one_group_and_only_matrices_decay(attention):
    model = build(attention=attention, qkv_bias=True)
    optimizer = build_optimizer(model, OptimizerConfig(weight_decay=0.3))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = [(names[id(p)], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(name for name, _ in held) == sorted(names.values())
    decay = dict(held)
    assert set(decay.values()) == {0.0, 0.3}
    for name, parameter in model.named_parameters():
        exempt = parameter.ndim < 2 or name in ("pos_embed", "cls_token")
        assert decay[name] == (0.0 if exempt else 0.3), name


def test_raw_matrices_decay_and_their_biases_do_not():
    model = build(qkv_bias=True)
    groups = build_optimizer(model, OptimizerConfig(weight_decay=0.3)).param_groups
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    raw = {name: decay[id(p)] for name, p in model.named_parameters() if name.startswith("blocks.0.attn.")}
    assert {name: rate for name, rate in raw.items() if "to_q" in name} == {
        "blocks.0.attn.qkv.to_q": 0.3,
        "blocks.0.attn.qkv.to_q_bias": 0.0,
    }


def test_frozen_parameters_are_in_no_group():
    model = build()
    frozen = set(zoo.freeze(model, ["patch_embed", "blocks.0", "*.bias"]))
    optimizer = build_optimizer(model, OptimizerConfig())
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for name, p in model.named_parameters() if name not in frozen}


def test_tied_parameter_is_held_once():
    model = build()
    model.blocks[1].mlp.fc1.weight = model.blocks[0].mlp.fc1.weight
    held = [id(p) for group in build_optimizer(model, OptimizerConfig()).param_groups for p in group["params"]]
    assert len(held) == len(set(held)) == len(list(model.parameters()))


@pytest.mark.parametrize("name", ["0.weight", "1.weight"])
def test_tied_parameter_is_exempt_if_any_of_its_names_is(name):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model.no_weight_decay = lambda: {name}
    assert find_exempt(model) == {name}
    zoo.tie(model, "0.weight = 1.weight")
    assert find_exempt(model) == {"0.weight"}
    groups = build_optimizer(model, OptimizerConfig(weight_decay=0.3)).param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(3, 0.0)]


BACKBONES = [
    "vit_tiny_patch16_224",
    "vit_small_patch16_rope_ape_224",
    "eva02_tiny_patch14_224",
    "beit_base_patch16_224",
    "vit_relpos_small_patch16_224",
    "deit_tiny_distilled_patch16_224",
]


@pytest.mark.parametrize("attention", ["linear", "separate", "parameter"])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_as_many_numbers_decay_as_in_timms_own_model(backbone, attention):
    """Biases that a swap stores by part decay no more than timm's, and every name that timm spares is spared."""

    def decayed(model, groups):
        held = [parameter for group in groups for parameter in group["params"]]
        assert sorted(map(id, held)) == sorted(map(id, model.parameters()))
        return sum(p.numel() for group in groups if group["weight_decay"] for p in group["params"])

    kwargs = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 3}
    stock = timm.create_model(backbone, **kwargs)
    theirs = param_groups_weight_decay(stock, 0.3, no_weight_decay_list=stock.no_weight_decay())
    model = build(backbone, attention)
    assert find_exempt(model) >= {"pos_embed", "cls_token"} & {name for name, _ in model.named_parameters()}
    ours = build_optimizer(model, OptimizerConfig(weight_decay=0.3)).param_groups
    assert decayed(model, ours) == decayed(stock, theirs) > 0


def test_model_with_nothing_to_exempt_makes_one_group():
    model = torch.nn.Linear(4, 4, bias=False)
    assert len(build_optimizer(model, OptimizerConfig()).param_groups) == 1


def test_backbone_that_names_no_exemptions_is_taken_as_it_is():
    model = timm.create_model("resnet18", num_classes=3)
    optimizer = build_optimizer(model, OptimizerConfig(weight_decay=0.1))
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, 0.1}


def steps_of(accelerator, root: str) -> list[float]:
    """Take every step of a run with accumulation and return the rates that the optimizer was given."""
    share = 4 // accelerator.num_processes  # the same number of steps for any number of ranks
    config = tiny_config(root, loop__accumulation_steps=2, loop__batch_size_per_rank=share, schedule__epochs=3)
    run, given = build_tiny(config), []
    with swapped(step_module, "set_learning_rate", lambda optimizer, lr: _note(optimizer, lr, given)):
        for batches in run.batches():
            train_step(run, batches)
    assert accelerator.num_processes == run.accelerator.num_processes
    return given


def _note(optimizer, lr, given):
    set_learning_rate(optimizer, lr)
    given.append(optimizer.param_groups[0]["lr"])


@pytest.mark.slow
def test_rates_are_the_same_for_one_rank_and_two_under_accumulation(run_ranks, tmp_path):
    root = str(write_images(tmp_path / "images", train=6))
    alone, two = run_ranks(steps_of, world_size=1, root=root), run_ranks(steps_of, world_size=2, root=root)
    assert not alone[0].error, alone[0].traceback
    assert not two[0].error, two[0].traceback
    expected = [learning_rate(k, peak=1e-2, warmup_steps=2, total_steps=6, min_ratio=0.0) for k in range(6)]
    assert alone[0].value == two[0].value == two[1].value == expected
