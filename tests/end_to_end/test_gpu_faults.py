"""Faults over NCCL, whose collectives do not break off when a rank is gone: they wait on the GPU, for ever."""

from pathlib import Path

import pytest
import torch

from tests.end_to_end.chain import make_store
from tests.end_to_end.faults import Folder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning"),  # MLflow's own, not ours to mend
]


@pytest.mark.parametrize(
    ("plan", "told", "status"),
    [
        ("raise:1", "rank 1, step", "FAILED"),
        ("kill:1", "rank 1 (pid", "FAILED"),
        ("kill:0", "rank 0 (pid", "FAILED"),
        ("hang:1", "rank 1 (pid", "FAILED"),
        ("launcher-term:1", "SIGTERM after step", "KILLED"),
    ],
)
def test_fault_ends_all_gpus_and_the_run_goes_on(
    plan: str, told: str, status: str, tmp_path: Path, shell: dict[str, str]
) -> None:
    folder = Folder(tmp_path / "run", shell).prepare(make_store(tmp_path / "empty.db"))
    end = folder.launch("--watch.timeout_s", "8", plan=plan)
    assert end.status != 0, end.text
    assert end.left == ()
    (line,) = end.told
    assert told in line, end.text
    assert end.run_status == status
    again = folder.launch()
    assert again.status == 0, again.text
    assert again.run_status == "FINISHED"
