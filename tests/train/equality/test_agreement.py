import logging
import os
import re

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from tests.train.tiny import build_tiny, tiny_config, write_images
from train.build import wrap
from train.equality import facts
from train.equality.agreement import check_agreement, check_streams
from train.equality.facts import data_facts, first_draws, resume_facts, start_facts
from train.run import Run


def said(check, *arguments, **options) -> str:
    try:
        check(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "passed"


def fail() -> dict[str, str]:
    raise OSError("disk is gone")


def disagree(accelerator: Accelerator, roots: list[str]) -> dict[str, str]:
    """Check with facts that differ on the last rank alone, of each kind; the config and the data are real ones."""
    rank, world_size = accelerator.process_index, accelerator.num_processes
    odd = rank == world_size - 1
    heard = {}

    def check(case: str, collect, what: str = "start") -> None:
        heard[case] = said(check_agreement, accelerator, collect, what=what)

    config = tiny_config(roots[0])
    environ = dict(os.environ)
    check("equal", lambda: start_facts(config, environ))
    elsewhere = tiny_config(
        roots[0], data__num_workers=rank, log__every_steps=1 + rank, data__root=roots[odd], model__plugins=f"{rank}.py"
    )
    check("own places", lambda: start_facts(elsewhere, environ))
    other = tiny_config(roots[0], optimizer__lr=0.002 if odd else 0.001, augment__hflip=0.25 if odd else 0.5)
    check("config", lambda: start_facts(other, environ))
    check("world", lambda: start_facts(config, {**environ, "WORLD_SIZE": "8" if odd else "2"}))
    check("failing", fail if odd else lambda: start_facts(config, environ))
    check("absent", lambda: {"config: a": 1} if odd else {"config: a": 1, "config: b": None})
    check("device", lambda: {"device: name": "H200" if odd else "H100"})
    check("many", lambda: {f"config: {i}": rank if odd else 0 for i in range(11)})
    check("resume", lambda: resume_facts("3fa1", 40 if odd else 50, 4 if odd else 5, "ab"), "checkpoint")
    heard["versions"] = check_with(accelerator, "_find_version", lambda name: f"{name} 1.{rank}")
    sources = {"train/loop.py": f"a{rank}", "zoo/swap.py": "b"}
    heard["code"] = check_with(accelerator, "hash_sources", lambda: sources)
    runs = [build_tiny(tiny_config(root), wrapped=False) for root in roots]
    check("equal data", lambda: data_facts(runs[0].data), "data")
    check("data", lambda: data_facts(runs[odd].data), "data")
    return heard


def check_with(accelerator: Accelerator, name: str, function) -> str:
    kept = getattr(facts, name)
    setattr(facts, name, function)
    try:
        config = tiny_config("images")
        return said(check_agreement, accelerator, lambda: start_facts(config, {}), what="start")
    finally:
        setattr(facts, name, kept)


def draw(accelerator: Accelerator, root: str) -> dict[str, str]:
    """Check the streams of a real run as it should be, and with each of the usual mistakes."""
    heard = {}
    run = build_tiny(tiny_config(root), wrapped=False)
    wrap(run)

    def check(case: str, run: Run = run) -> None:
        heard[case] = said(
            check_streams, accelerator, lambda: first_draws(run.data, run.train_loader, run.plan.locate(0))
        )

    check("sound")
    heard["position"] = str(next(iter(run.train_loader.batch_sampler))[0].epoch)
    set_seed(7)
    check("same seed")
    set_seed(7, device_specific=True)
    check("device-specific seed")
    run.train_loader.batch_sampler._rank = 0
    check("sampler without rank")
    heard["standalone"] = said(check_streams, accelerator)
    heard["failing"] = said(check_streams, accelerator, fail if accelerator.process_index else dict)
    torch.manual_seed(3)
    heard["standalone, same seed"] = said(check_streams, accelerator, what="epoch 2")
    return heard


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two copies of a data set; in the second one file is of another size, and one has another name."""
    folders = [write_images(tmp_path_factory.mktemp(name) / "images") for name in ("here", "there")]
    image = folders[1] / "train" / "oak" / "0.png"
    image.write_bytes(image.read_bytes() + b"\0")
    (folders[1] / "val" / "elm" / "1.png").rename(folders[1] / "val" / "elm" / "9.png")
    return [str(folder) for folder in folders]


def ask(run_ranks, function, **arguments) -> dict[str, str]:
    first, second = run_ranks(function, **arguments)
    assert not first.error, first.traceback
    assert first.value == second.value
    return first.value


@pytest.fixture(scope="module")
def disagreed(run_ranks, roots) -> dict[str, str]:
    return ask(run_ranks, disagree, roots=roots)


@pytest.fixture(scope="module")
def drawn(run_ranks, roots) -> dict[str, str]:
    return ask(run_ranks, draw, root=roots[0])


DISAGREEMENTS = {
    "config": (
        r"^RanksDisagree: start: rank 1 of 2 disagrees with rank 0 on config: augment\.hflip, config: optimizer\.lr\n",
        r"  config: optimizer\.lr: 0\.001 on rank 0, 0\.002 on rank 1\n",
        r"  way out: give the launch command of every machine the same recipe",
    ),
    "world": (r'world: WORLD_SIZE: "2" on rank 0, "8" on rank 1\n', "way out: start every machine's launcher"),
    "failing": (r"^OSError: disk is gone \(rank 1 of 2, agreement on start\)$",),
    "absent": (r"config: b: null on rank 0, absent on rank 1\n",),
    "many": ("on config: 0, config: 1, config: 2 and 8 more\n", r"\.\.\. and 3 more of config\n"),
    "resume": (
        "^RanksDisagree: checkpoint: rank 1 of 2 .* on checkpoint: step, checkpoint: epoch\n",
        "checkpoint: step: 50 on rank 0, 40 on rank 1\n",
        "way out: let all ranks resume from the same checkpoint",
    ),
    "versions": (
        r'version: timm: "timm 1\.0" on rank 0, "timm 1\.1" on rank 1\n',
        "way out: install the same versions",
    ),
    "code": (
        r"on code: train/loop\.py\n",
        r'code: train/loop\.py: "a0" on rank 0, "a1" on rank 1\n',
        "way out: check out",
    ),
    "data": (
        r"data: training files: \"\w{32}\" on rank 0",
        r"data: validation files: ",
        r'data: validation class elm: "3 images, names \w{8}" on rank 0',
        "way out: give all machines the same copy of data.root",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", DISAGREEMENTS)
def test_ranks_that_disagree_all_raise_what_differs_and_the_way_out(disagreed, case) -> None:
    for line in DISAGREEMENTS[case]:
        assert re.search(line, disagreed[case], flags=re.MULTILINE), disagreed[case]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["equal", "own places", "device", "equal data"])
def test_what_may_differ_passes(disagreed, case) -> None:
    assert disagreed[case] == "passed"


@pytest.mark.slow
def test_class_of_which_only_a_size_differs_is_in_the_fingerprint_alone(disagreed) -> None:
    assert "training class" not in disagreed["data"]


@pytest.mark.slow
def test_sound_streams_pass_and_the_position_stays(drawn) -> None:
    assert {drawn[case] for case in ("sound", "device-specific seed", "standalone")} == {"passed"}
    assert drawn["position"] == "0"


@pytest.mark.slow
def test_streams_that_are_alike_are_named_with_the_likely_cause(drawn) -> None:
    assert drawn["same seed"].startswith("RanksDisagree: random streams, first step: ranks are alike where they must")
    assert "\n  dropout: equal on ranks 0 and 1; likely cause: torch's random state" in drawn["same seed"]
    assert "images" not in drawn["same seed"]
    alike = drawn["sampler without rank"]
    assert re.search(r"\n  images of the first batch: equal on ranks 0 and 1 \(2 of 2, such as \d+\)", alike)
    assert "the sampler was not told its rank" in alike
    assert "\n  augmentation of the first batch: equal on ranks 0 and 1 (2 of 2, such as " in alike
    assert drawn["failing"] == "OSError: disk is gone (rank 1 of 2, random streams, first step)"
    assert drawn["standalone, same seed"].startswith("RanksDisagree: random streams, epoch 2: ")


def test_world_of_one_agrees_with_itself_and_collects_nothing() -> None:
    accelerator = Accelerator(cpu=True)
    check_agreement(accelerator, fail, what="start")
    check_streams(accelerator, fail)


def test_other_hardware_is_told_and_no_error(monkeypatch, caplog) -> None:
    from train.equality import agreement

    told = [{"facts": {"device: name": name}, "host": name} for name in ("H100", "H200")]
    monkeypatch.setattr(agreement, "made_alike", lambda *_: False)
    monkeypatch.setattr(agreement, "gather_json", lambda *_: told)

    class TwoRanks:
        num_processes, is_main_process = 2, True

    with caplog.at_level(logging.WARNING):
        check_agreement(TwoRanks(), dict, what="start")
    assert '\n  device: name: "H100" on rank 0 (H100), "H200" on rank 1 (H200)\n' in caplog.text
