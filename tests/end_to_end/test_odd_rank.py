"""Ranks that are not alike, or are where they must differ, through the real launcher: all end, and one says why."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.train.tiny import write_images

ROOT = Path(__file__).parent.parent.parent
TINY = {
    "name": "tiny",
    "data.root": "here",
    "schedule.epochs": 2,
    "schedule.warmup_epochs": 1,
    "loop.batch_size_per_rank": 2,
    "model.timm_kwargs.depth": 1,
    "model.timm_kwargs.embed_dim": 16,
    "model.timm_kwargs.num_heads": 2,
    "freeze": "patch_embed",
    "publish.enabled": "false",
    "watch.drift_every_steps": 1,
}
SAID = {
    "starts_otherwise": (
        r"error: start: rank 1 of 2 disagrees with rank 0 on config: optimizer\.lr, version: timm, code: train/step",
        r"config: optimizer\.lr: 0\.002 on rank 0, 0\.004 on rank 1",
        "way out: install the same versions",
        "way out: check out the same commit",
    ),
    "reads_other_data": (
        "error: data: rank 1 of 2 disagrees with rank 0 on data: ",
        "data: training images: 12 on rank 0, 15 on rank 1",
        "way out: give all machines the same copy of data.root",
    ),
    "draws_alike": (
        "error: random streams, first step: ranks are alike where they must differ\n",
        "dropout: equal on ranks 0 and 1; likely cause: torch's random state",
        r"images of the first batch: equal on ranks 0 and 1 \(2 of 2, .* likely cause: .* sampler was not told its",
    ),
    "unfreezes_in_mid_run": (
        "error: replica check after step 3: rank 1 of 2 differs from rank 0",
        r"likely cause: unsynchronised: patch_embed\.proj\.weight, patch_embed\.proj\.bias were made trainable or",
    ),
    "skips_a_step": (
        "error: replica check after step 3: rank 1 of 2 differs from rank 0",
        r"likely cause: rank 1 took 1 optimizer step fewer than rank 0 \(3 on rank 0, 2 on rank 1\)",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two data sets, one with more images than the other."""
    folder = tmp_path_factory.mktemp("odd")
    write_images(folder / "here")
    write_images(folder / "there", train=5)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("mistake", SAID)
def test_ranks_that_are_not_as_they_must_be_end_together_in_one_message(mistake, folder, shell) -> None:
    arguments = [text for name, value in TINY.items() for text in (f"--{name}", str(value))]
    command = ["accelerate", "launch", "--config_file", str(ROOT / "accelerate_config.yaml")]
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("odd_rank.py")), mistake, *arguments, "--output_dir", mistake],
        cwd=folder,
        env={**shell, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode != 0
    for line in SAID[mistake]:
        assert re.search(line, done.stderr), done.stderr
    assert done.stderr.count("error: ") == 1
    assert "result " not in done.stdout
