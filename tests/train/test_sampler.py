import pytest

from train.errors import DataError
from train.sampler import EpochBatches, val_shard


def build(rank=0, world_size=2, num_images=21, batch_size=4, seed=0, **options):
    return EpochBatches(num_images, batch_size, rank=rank, world_size=world_size, seed=seed, **options)


def flat(batches):
    return [draw.image for batch in batches for draw in batch]


def images(batches):
    return [[draw.image for draw in batch] for batch in batches]


def test_three_epochs_on_two_ranks_differ_are_disjoint_and_cover_the_set():
    ranks = [build(rank) for rank in (0, 1)]
    orders = []
    for epoch in range(3):
        seen = [flat(rank) for rank in ranks]
        assert [len(s) for s in seen] == [8, 8]  # 21 // (2 x 4) = 2 batches each
        assert len({*seen[0], *seen[1]}) == 16, epoch
        orders.append(tuple(seen[0] + seen[1]))
    assert len(set(orders)) == 3
    whole = [build(rank, num_images=16) for rank in (0, 1)]
    for _ in range(3):
        assert sorted(image for rank in whole for image in flat(rank)) == list(range(16))


def test_dropped_tail_is_another_each_epoch():
    sampler = build(world_size=1)
    seen = set()
    for _ in range(8):
        seen |= set(flat(sampler))
    assert seen == set(range(21))


def test_draws_carry_their_epoch():
    sampler = build()
    assert [{draw.epoch for batch in sampler for draw in batch} for _ in range(3)] == [{0}, {1}, {2}]


def test_global_batch_is_the_same_on_any_number_of_ranks():
    alone = images(build(world_size=1, batch_size=8))
    pair = [images(build(rank)) for rank in (0, 1)]
    assert [a + b for a, b in zip(*pair, strict=True)] == alone


def test_set_position_goes_on_where_an_uninterrupted_run_would_be():
    straight = build()
    epochs = [images(straight) for _ in range(3)]
    resumed = build()
    resumed.set_position(1, 8)
    assert images(resumed) == epochs[1][1:]
    assert images(resumed) == epochs[2]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_other_ranks_go_on_behind_what_was_seen_and_leave_out_the_tail_alone(world_size, steps):
    """Two ranks see some of 50 images in steps of 16; whoever goes on sees the rest of the same order, once."""
    order = flat(build(0, 1, num_images=50, batch_size=50))
    before = [images(build(rank, num_images=50, accumulation_steps=2)) for rank in (0, 1)]
    seen = [image for batch in range(2 * steps) for rank in before for image in rank[batch]]
    assert seen == order[: 16 * steps]
    after = [build(rank, world_size, num_images=50, batch_size=3) for rank in range(world_size)]
    for sampler in after:
        sampler.set_position(0, 16 * steps)
    rest = [image for batches in zip(*map(images, after), strict=True) for batch in batches for image in batch]
    left = 50 - 16 * steps
    assert rest == order[16 * steps :][: left - left % (3 * world_size)]
    assert [len(flat(sampler)) for sampler in after] == [len(sampler) * 3 for sampler in after]  # the next is whole


def test_pass_left_by_break_does_not_repeat_its_order():
    sampler = build()
    first = next(iter(sampler))
    second = next(iter(sampler))
    assert (first[0].epoch, second[0].epoch) == (0, 1)


def test_iterator_that_is_never_drawn_from_costs_no_epoch():
    sampler = build()
    iter(sampler)  # a DataLoader with workers makes two for its first pass
    assert next(iter(sampler))[0].epoch == 0


def test_other_seed_gives_another_order():
    assert images(build(seed=0)) != images(build(seed=1))


def test_set_smaller_than_a_global_batch_is_refused():
    with pytest.raises(
        DataError, match=r"7 training images are fewer than one global batch of 8 = 4 per rank x 2 ranks"
    ):
        build(num_images=7)
    with pytest.raises(DataError, match="3 accumulation steps"):
        build(accumulation_steps=3)


def test_epoch_has_whole_optimizer_steps():
    assert len(build(num_images=40, accumulation_steps=3)) == 3  # 5 batches fit, 3 make a step
    assert len(images(build(num_images=40, accumulation_steps=3))) == 3


@pytest.mark.parametrize(("epoch", "seen"), [(-1, 0), (0, -1), (0, 14), (0, 21)])
def test_position_without_a_step_behind_it_is_refused(epoch, seen):
    build().set_position(0, 13)
    with pytest.raises(ValueError, match=f"epoch {epoch} has no step of 8 images after the first {seen} of 21"):
        build().set_position(epoch, seen)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("num_images", [0, 1, 2, 9])
def test_shards_hold_each_image_exactly_once(num_images, world_size):
    shards = [val_shard(num_images, rank, world_size) for rank in range(world_size)]
    assert sorted(i for shard in shards for i in shard) == list(range(num_images))
