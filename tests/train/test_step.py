from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from tests.train.tiny import build_tiny, same, swapped, tiny_config, weights, write_images
from train import step as step_module
from train.errors import NonFiniteLoss
from train.evaluate import evaluate
from train.run import Run
from train.saving.resume import save_checkpoint
from train.step import train_step


def steps(run: Run, count: int) -> list:
    """Take up to `count` steps; return their results."""
    return [train_step(run, batches) for _, batches in zip(range(count), run.batches(), strict=False)]


def gradients(run: Run) -> list:
    return [parameter.grad.clone() for parameter in run.bare.parameters() if parameter.requires_grad]


def planted(value: float, *, at: int, real=F.cross_entropy):
    """A functional module whose cross-entropy is multiplied by `value` from call `at` on, counted from 0."""
    calls = iter(range(10**6))

    def cross_entropy(*args, **kwargs):
        return real(*args, **kwargs) * (value if next(calls) >= at else 1.0)

    return SimpleNamespace(cross_entropy=cross_entropy)


def test_step_moves_every_parameter_and_counts_images(tiny):
    run = build_tiny(tiny())
    before = weights(run)
    (result,) = steps(run, 1)
    assert run.step == 1
    assert (result.images, result.lr) == (2, 1e-2 / 6)
    assert [name for name, tensor in weights(run).items() if torch.equal(tensor, before[name])] == []


def test_gradients_stay_after_a_step_and_are_new_at_the_next(tiny):
    run, cleared = build_tiny(tiny()), build_tiny(tiny())
    steps(run, 1)
    steps(cleared, 1)
    first = gradients(run)
    for parameter in cleared.bare.parameters():
        parameter.grad = None
    train_step(run, next(run.batches()))
    train_step(cleared, next(cleared.batches()))
    assert all(torch.equal(a, b) for a, b in zip(gradients(run), gradients(cleared), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(gradients(run), first, strict=True))


def test_two_micro_batches_give_the_gradient_of_one_large_batch(tiny):
    large = build_tiny(tiny(loop__batch_size_per_rank=4, optimizer__clip_grad_norm=None))
    (whole,) = steps(large, 1)
    large_gradients = gradients(large)
    halves = build_tiny(tiny(loop__batch_size_per_rank=2, loop__accumulation_steps=2, optimizer__clip_grad_norm=None))
    (parts,) = steps(halves, 1)
    # sums in another order: float32's rounding, on gradients of about 0.1
    torch.testing.assert_close(gradients(halves), large_gradients, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(parts.loss, whole.loss)
    assert parts.images == whole.images == 4


def test_clipping_bounds_the_norm_of_the_whole_gradient(tiny):
    run = build_tiny(tiny(optimizer__clip_grad_norm=1e-3))
    steps(run, 1)
    norm = torch.stack([gradient.norm() for gradient in gradients(run)]).norm().item()
    assert norm == pytest.approx(1e-3, rel=1e-3)


def test_null_does_not_clip(tiny):
    free, loose = build_tiny(tiny(optimizer__clip_grad_norm=None)), build_tiny(tiny(optimizer__clip_grad_norm=1e6))
    steps(free, 1)
    steps(loose, 1)
    assert all(torch.equal(a, b) for a, b in zip(gradients(free), gradients(loose), strict=True))


@pytest.mark.parametrize("clip", [1.0, None])
@pytest.mark.parametrize(("value", "word"), [(float("nan"), "nan"), (float("inf"), "inf")])
def test_loss_that_is_not_finite_stops_before_the_weights_move(tiny, monkeypatch, clip, value, word):
    run = build_tiny(tiny(optimizer__clip_grad_norm=clip))
    monkeypatch.setattr(step_module, "F", planted(value, at=1))
    steps(run, 1)
    before = weights(run)
    with pytest.raises(NonFiniteLoss, match=rf"step 1: the loss is {word} on rank 0; .*--optimizer.lr \(now 0.01\)"):
        steps(run, 1)
    assert same(weights(run), before)
    assert run.step == 1


def test_infinite_loss_with_finite_gradients_stops_too(tiny):
    """As fp16 has it: the target's logit overflows to -inf, while softmax's gradient stays between -1 and 1."""
    run = build_tiny(tiny())
    with torch.no_grad():
        run.bare.head.bias[0] = float("-inf")
    images, _ = next(run.batches())[0]
    with pytest.raises(NonFiniteLoss, match="the loss is inf on rank 0"):
        train_step(run, [(images, torch.tensor([0, 0]))])


def test_gradient_that_is_not_finite_stops_though_the_loss_is(tiny):
    run = build_tiny(tiny())
    run.bare.head.weight.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(NonFiniteLoss, match="the loss is finite, but its gradient is not"):
        steps(run, 1)


def test_fp16_goes_on_after_an_overflow_that_the_scaler_skips(tiny, monkeypatch):
    run = build_tiny(tiny())
    monkeypatch.setattr(type(run.accelerator), "mixed_precision", "fp16")
    run.bare.head.weight.register_hook(lambda gradient: gradient * float("inf"))
    monkeypatch.setattr(run.optimizer.optimizer, "step", lambda *_: None)  # what the scaler does then
    steps(run, 1)
    monkeypatch.setattr(step_module, "F", planted(float("nan"), at=0))
    with pytest.raises(NonFiniteLoss, match="the loss is nan on rank 0"):
        steps(run, 1)


def test_bf16_trains_and_evaluation_stays_in_full_precision(tiny):
    run = build_tiny(tiny(loop__mixed_precision="bf16"))
    seen = []
    run.bare.blocks[0].mlp.fc1.register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    first, *_, last = steps(run, 6)
    assert set(seen) == {torch.bfloat16}
    seen.clear()
    evaluate(run)
    assert set(seen) == {torch.float32}
    assert all(parameter.dtype == torch.float32 for parameter in run.bare.parameters())
    assert torch.isfinite(torch.stack([first.loss, last.loss])).all()


def test_label_smoothing_is_in_the_loss(tiny):
    plain, smooth = build_tiny(tiny()), build_tiny(tiny(optimizer__label_smoothing=0.5))
    assert steps(plain, 1)[0].loss != steps(smooth, 1)[0].loss


def two_ranks(accelerator, root: str) -> dict[str, object]:
    """Plant a NaN on rank 1 at the third step, after a checkpoint at the second."""
    run = build_tiny(tiny_config(root))
    steps(run, 2)
    save_checkpoint(run)
    before = weights(run)
    said = ""
    fault = planted(float("nan"), at=0) if accelerator.process_index == 1 else F
    try:
        with swapped(step_module, "F", fault):
            steps(run, 1)
    except NonFiniteLoss as error:
        said = str(error)
    return {
        "said": said,
        "unchanged": same(weights(run), before),
        "step": run.step,
        "kept": [path.name for path in run.checkpoints.iterdir()],
    }


@pytest.mark.slow
def test_nan_on_one_rank_stops_both_with_one_message(run_ranks, tmp_path):
    outcomes = run_ranks(two_ranks, root=str(write_images(tmp_path / "images")))
    assert not any(outcome.error for outcome in outcomes), outcomes[0].traceback
    first, second = (outcome.value for outcome in outcomes)
    assert first == second
    assert first["said"].startswith("step 2: the loss is nan on rank 1; stopped before the weights moved")
    assert "the last good checkpoint is" in first["said"]
    assert "step-00000002" in first["said"]
    assert (first["unchanged"], first["step"], first["kept"]) == (True, 2, ["step-00000002"])


def frozen_on_two_ranks(accelerator, root: str) -> dict[str, object]:
    config = tiny_config(root, freeze=["patch_embed", "blocks.0.attn", "pos_embed"])
    run = build_tiny(config)
    before = weights(run)
    losses = [result.loss.item() for result in steps(run, 3)]
    moved = [name for name, tensor in weights(run).items() if not torch.equal(tensor, before[name])]
    wrapper = run.model
    return {
        "moved": moved,
        "losses": len(losses),
        "ddp": type(wrapper).__name__,
        "flag": wrapper.find_unused_parameters,
        "rank": accelerator.process_index,
    }


@pytest.mark.slow
def test_frozen_patterns_train_on_two_ranks_without_a_flag_of_ddp(run_ranks, tmp_path):
    for outcome in run_ranks(frozen_on_two_ranks, root=str(write_images(tmp_path / "images"))):
        assert not outcome.error, outcome.traceback
        assert (outcome.value["ddp"], outcome.value["flag"]) == ("DistributedDataParallel", False)
        assert outcome.value["losses"] == 3
        moved = set(outcome.value["moved"])
        assert "head.weight" in moved
        assert not [name for name in moved if name.startswith(("patch_embed", "blocks.0.attn", "pos_embed"))]
