import pytest

from train.optim import learning_rate
from train.position import EpochPlan, Origin, Position


def rates(plan: EpochPlan, steps: range) -> list[float]:
    total = plan.steps_per_epoch * plan.epochs
    return [
        learning_rate(plan.find_schedule_step(k), peak=0.1, warmup_steps=3, total_steps=total, min_ratio=0.01)
        for k in steps
    ]


def test_steps_of_a_run_with_one_global_batch_size_lie_where_their_number_says():
    plan = EpochPlan(num_images=23, global_batch_size=4, epochs=3)
    assert (plan.steps_per_epoch, plan.total_steps) == (5, 15)
    assert [plan.locate(step) for step in (0, 1, 4, 5, 14, 15)] == [(0, 0), (0, 4), (0, 16), (1, 0), (2, 16), (3, 0)]


def test_rates_of_a_run_with_one_global_batch_size_are_those_of_the_step_bit_for_bit():
    plan = EpochPlan(num_images=1437, global_batch_size=64, epochs=9)
    assert rates(plan, range(plan.total_steps)) == [
        learning_rate(k, peak=0.1, warmup_steps=3, total_steps=198, min_ratio=0.01) for k in range(198)
    ]


@pytest.mark.parametrize("size", [1, 3, 4, 8, 16, 23])
@pytest.mark.parametrize("step", [0, 3, 5, 7, 10, 14, 15])
def test_other_ranks_finish_the_epoch_behind_what_was_seen_and_all_later_ones_whole(size, step):
    before = EpochPlan(num_images=23, global_batch_size=4, epochs=3)
    after = before.go_on_as(size, step)
    epoch, seen = before.locate(step)
    expected = [(epoch, first) for first in range(seen, 23 - size + 1, size)] if epoch < 3 else []
    expected += [(later, first) for later in range(epoch + 1, 3) for first in range(0, 23 - size + 1, size)]
    assert [after.locate(k) for k in range(step, after.total_steps)] == expected
    assert after.locate(after.total_steps) == (3, 0)


def test_plan_may_be_taken_over_again_and_again():
    plan = EpochPlan(num_images=100, global_batch_size=10, epochs=4)
    plan = plan.go_on_as(20, 13)  # 30 images into the second epoch
    assert plan.origin == Origin(13, 1, 30)
    assert [plan.locate(k) for k in (13, 15, 16)] == [(1, 30), (1, 70), (2, 0)]
    plan = plan.go_on_as(7, 15)
    assert [plan.locate(k) for k in (15, 18, 19)] == [(1, 70), (1, 91), (2, 0)]
    assert plan.total_steps == 15 + 4 + 2 * 14


def test_same_global_batch_on_other_ranks_changes_nothing():
    plan = EpochPlan(num_images=100, global_batch_size=10, epochs=4, origin=Origin(3, 0, 60))
    assert plan.go_on_as(10, 7) is plan


def test_schedule_goes_on_at_the_same_part_of_the_run_and_epochs_align():
    before = EpochPlan(num_images=96, global_batch_size=8, epochs=4)
    for step in range(before.total_steps):
        after = before.go_on_as(32, step)
        epoch, seen = before.locate(step)
        part = (epoch + (seen / 96 if 96 - seen >= 32 else 1)) / 4  # what fills no step is the tail
        assert after.find_schedule_step(step) / (after.steps_per_epoch * 4) == pytest.approx(part)
        starts = [k for k in range(step, after.total_steps) if after.locate(k).images == 0]
        assert [after.find_schedule_step(k) for k in starts] == [3 * after.locate(k).epoch for k in starts]


@pytest.mark.parametrize("size", [3, 7, 30, 96])
def test_rate_never_rises_after_the_warm_up_whoever_goes_on(size):
    before = EpochPlan(num_images=100, global_batch_size=8, epochs=4)
    for step in (13, 20, 47):
        after = before.go_on_as(size, step)
        got = rates(after, range(step, after.total_steps))
        peak = next((k for k in range(step, after.total_steps) if after.find_schedule_step(k) >= 3), after.total_steps)
        falling = got[peak - step :]
        assert falling == sorted(falling, reverse=True)


def test_position_names_its_parts():
    assert Position(1, 2)._asdict() == {"epoch": 1, "images": 2}
