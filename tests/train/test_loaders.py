import io
import multiprocessing
import signal
import sys

import psutil
import pytest
import torch
from PIL import Image

from train.config import AugmentConfig, DataConfig, EvaluateConfig, LoopConfig
from train.data import build_data
from train.errors import DataError
from train.loaders import build_train_loader, build_val_loader
from zoo.card import Preprocessing

PREPROCESSING = Preprocessing(size=(8, 8), crop_pct=1.0, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
LOOP = LoopConfig(batch_size_per_rank=32)


@pytest.fixture(scope="module")
def data():
    return build_data(DataConfig(root="builtin:digits"), AugmentConfig(), PREPROCESSING, 0)


def train_loader(data, rank=0, world_size=2, num_workers=0):
    return build_train_loader(data, LOOP, num_workers=num_workers, rank=rank, world_size=world_size)


def same(left, right):
    return all(torch.equal(a, b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True))


def test_batches_have_inputs_and_labels(data):
    loader = train_loader(data)
    x, y = next(iter(loader))
    assert (x.shape, x.dtype) == ((32, 3, 8, 8), torch.float32)
    assert (y.shape, y.dtype) == ((32,), torch.int64)
    assert len(loader) == 1437 // 64


def test_two_ranks_draw_other_augmentations_each_epoch(data):
    batches = [next(iter(train_loader(data, rank)))[0] for rank in (0, 1)]
    assert len({x.numpy().tobytes() for batch in batches for x in batch}) == 64


def test_resumed_loader_gives_the_batches_of_an_uninterrupted_one(data):
    straight = train_loader(data, rank=1)
    list(straight)
    second = list(straight)
    resumed = train_loader(data, rank=1)
    resumed.set_position(1, 20 * 64)
    assert same(list(resumed), second[20:])


def test_loading_leaves_dropouts_stream_alone(data):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    next(iter(train_loader(data)))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.slow
def test_workers_change_nothing(data):
    alone, helped = train_loader(data), train_loader(data, num_workers=2)
    for _ in range(2):
        assert same(list(alone), list(helped))


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_evaluation_scores_each_image_once_on_any_number_of_ranks(data, world_size):
    evaluate = EvaluateConfig(batch_size_per_rank=50)
    labels, total = [], torch.zeros(3, 8, 8, dtype=torch.float64)
    for rank in range(world_size):
        for x, y in build_val_loader(data, evaluate, num_workers=0, rank=rank, world_size=world_size):
            labels += y.tolist()
            total += x.double().sum(0)
    assert sorted(labels) == sorted(data.val.images.labels)
    expected = torch.stack([data.val[i][0] for i in range(len(data.val))]).double().sum(0)
    torch.testing.assert_close(total, expected)


def test_rank_without_images_has_no_batches(data):
    loader = build_val_loader(data, EvaluateConfig(), num_workers=0, rank=400, world_size=500)
    assert len(loader) == 0
    assert list(loader) == []


def test_set_smaller_than_a_global_batch_is_refused(data):
    with pytest.raises(DataError, match="fewer than one global batch of 1600"):
        train_loader(data, world_size=50)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
def test_damaged_image_is_one_line_with_its_path_from_a_worker_too(tmp_path, num_workers):
    file = io.BytesIO()
    Image.effect_noise((64, 64), 90).save(file, "JPEG")
    for label in "ab":
        (tmp_path / label).mkdir()
        for i in range(4):
            (tmp_path / label / f"{i}.jpg").write_bytes(file.getvalue()[: -len(file.getvalue()) // 2])
    data = build_data(DataConfig(root=str(tmp_path)), AugmentConfig(), PREPROCESSING, 0)
    loop = LoopConfig(batch_size_per_rank=2)
    with pytest.raises(DataError, match=r"\.jpg: the image is damaged") as caught:
        list(build_train_loader(data, loop, num_workers=num_workers, rank=0, world_size=1))
    assert "\n" not in str(caught.value)


def load(data, pipe) -> None:
    """Be a rank: take a batch of each worker, say so, take the rest when asked, and end when asked."""
    batches = train_loader(data, world_size=1, num_workers=2)
    stream = iter(batches)
    next(stream), next(stream)
    pipe.send("ready")
    pipe.recv()
    pipe.send(sum(1 for _ in stream))
    pipe.recv()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's signal at a parent's death")
@pytest.mark.parametrize("killed", [False, True])
def test_workers_outlive_the_signals_that_a_group_gets_but_not_their_rank(data, killed):
    """A launcher sends SIGTERM, a terminal SIGINT, to all processes; the rank still wants the batches of its step."""
    context = multiprocessing.get_context("fork")
    pipe, theirs = context.Pipe()
    rank = context.Process(target=load, args=(data, theirs))
    rank.start()
    theirs.close()  # so that a rank that dies is an end of file here
    try:
        assert pipe.recv() == "ready"
        workers = psutil.Process(rank.pid).children(recursive=True)
        assert len(workers) == 2
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            for worker in workers:
                worker.send_signal(number)
        pipe.send("go on")
        assert pipe.recv() == 1437 // 32 - 2
        assert all(worker.is_running() for worker in workers)
        if not killed:  # it holds its loader to its very end
            pipe.send("end")
            rank.join(timeout=120)
            assert rank.exitcode == 0
    finally:
        rank.kill()
        rank.join()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive
