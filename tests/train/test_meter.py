import json

import torch

from train.meter import Meter
from train.step import StepResult


def fed(meter: Meter, *losses: float) -> Meter:
    for loss in losses:
        meter.add(StepResult(torch.tensor(loss), lr=0.5, images=8))
    return meter


def test_mean_after_a_resume_is_that_of_a_meter_that_was_never_stopped():
    draws = torch.rand(9, generator=torch.Generator().manual_seed(0)).tolist()
    straight = fed(Meter(), *draws)
    resumed = Meter()
    resumed.restore(json.loads(json.dumps(fed(Meter(), *draws[:4]).state())), torch.device("cpu"))
    assert torch.equal(fed(resumed, *draws[4:]).mean_loss(), straight.mean_loss())
    assert not torch.equal(fed(Meter(), *draws[4:]).mean_loss(), straight.mean_loss())


def test_resumed_meter_counts_the_throughput_of_its_own_process():
    meter = Meter()
    meter.restore([1.0, 2.0], torch.device("cpu"))
    assert (meter.images, meter.seconds) == (0, 0.0)
    assert fed(meter, 3.0).images == 8


def test_reset_meter_is_a_new_one():
    meter = fed(Meter(), 1.0)
    meter.reset()
    assert (meter.losses, meter.images, meter.seconds, meter.state()) == ([], 0, 0.0, [])
    meter.restore([], torch.device("cpu"))
    assert meter.losses == []
