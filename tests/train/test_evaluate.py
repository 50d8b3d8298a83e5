import pytest
import torch
from torch import nn

from tests.train.tiny import build_tiny, same, tiny_config, weights, write_images
from train.errors import NonFiniteLoss
from train.evaluate import evaluate, score


def test_score_sums_loss_hits_and_images():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0, -2.0], [0.0, 9.0, 0.0, 0.0, 0.0, 0.0]])
    loss, top1, top5, images = score(logits, torch.tensor([5, 1])).tolist()
    assert (top1, top5, images) == (1, 1, 2)
    assert loss == pytest.approx(nn.functional.cross_entropy(logits, torch.tensor([5, 1])).item() * 2)


def test_top5_of_fewer_than_five_classes_counts_every_image():
    assert score(torch.randn(4, 3), torch.tensor([0, 1, 2, 0])).tolist()[2:] == [4, 4]


def test_evaluation_scores_what_the_model_says_and_leaves_it_in_train_mode(tiny):
    run = build_tiny(tiny())
    before = weights(run)
    metrics = evaluate(run)
    run.bare.eval()
    with torch.no_grad():
        logits = torch.stack([run.bare(image[None])[0] for image, _ in run.data.val])
    targets = torch.tensor([label for _, label in run.data.val])
    assert metrics["val/top1"] == (logits.argmax(1) == targets).double().mean()
    assert metrics["val/loss"] == pytest.approx(nn.functional.cross_entropy(logits, targets).item(), abs=1e-6)
    assert metrics["val/top5"] == 1.0
    run.bare.train()
    evaluate(run)
    assert all(module.training for module in run.bare.modules())
    assert same(weights(run), before)


def test_evaluation_is_without_dropout_and_draws_nothing(tiny):
    run = build_tiny(tiny(model__timm_kwargs={"drop_rate": 0.5, "proj_drop_rate": 0.5}))
    state = torch.get_rng_state()
    assert evaluate(run) == evaluate(run)
    assert torch.equal(torch.get_rng_state(), state)


def test_loss_that_is_not_finite_is_no_score(tiny):
    run = build_tiny(tiny())
    with torch.no_grad():
        run.bare.head.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteLoss, match="step 0: val/loss is nan"):
        evaluate(run)


def rank_scores(accelerator, roots: list[str]) -> list[dict[str, float]]:
    """Score the same weights on each data set; batches of 4, as the padded gather of old got wrong."""
    found = []
    for root in roots:
        run = build_tiny(tiny_config(root, evaluate__batch_size_per_rank=4, model__init="normal"))
        mine = sum(len(targets) for _, targets in run.val_loader)
        total = accelerator.reduce(torch.tensor(mine), reduction="sum").item()
        found.append(evaluate(run) | {"images": total})
    return found


@pytest.mark.slow
def test_score_is_the_same_on_one_two_and_three_ranks(run_ranks, tmp_path):
    """Nine images, and two: fewer than the ranks."""
    nine = write_images(tmp_path / "nine" / "images", train=4, val=3)
    two = write_images(tmp_path / "two" / "images", train=6, val=1, classes=("ash", "elm"))
    outcomes = {n: run_ranks(rank_scores, world_size=n, roots=[str(nine), str(two)]) for n in (1, 2, 3)}
    alone = outcomes[1][0]
    assert not alone.error, alone.traceback
    assert [scores["images"] for scores in alone.value] == [9, 2]
    for outcome in outcomes[2] + outcomes[3]:
        assert not outcome.error, outcome.traceback
        for scores, expected in zip(outcome.value, alone.value, strict=True):
            assert (scores["val/top1"], scores["val/top5"]) == (expected["val/top1"], expected["val/top5"])
            assert scores["images"] == expected["images"]
            assert scores["val/loss"] == pytest.approx(expected["val/loss"], abs=1e-6)


def shared_statistics(accelerator, root: str) -> dict[str, object]:
    """Give each rank running statistics of its own, and evaluate."""
    run = build_tiny(tiny_config(root))
    run.bare.norm_of_test = nn.BatchNorm1d(3)
    run.bare.norm_of_test.running_mean.fill_(1.0 + accelerator.process_index)
    run.bare.norm_of_test.num_batches_tracked.fill_(7 + accelerator.process_index)
    evaluate(run)
    norm = run.bare.norm_of_test
    return {"mean": norm.running_mean.tolist(), "batches": norm.num_batches_tracked.item()}


@pytest.mark.slow
def test_running_statistics_are_rank_0s_before_scoring(run_ranks, tmp_path):
    outcomes = run_ranks(shared_statistics, root=str(write_images(tmp_path / "images")))
    assert not any(outcome.error for outcome in outcomes), outcomes[0].traceback
    assert [outcome.value["mean"] for outcome in outcomes] == [[1.0] * 3] * 2
