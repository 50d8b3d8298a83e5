import os
from pathlib import Path

import pytest

from serve.engines.cores import count_cores


@pytest.fixture
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))


@pytest.mark.usefixtures("sixteen_cores")
@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("max 100000", 16),
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("5000 100000", 1),
        ("9900000 100000", 16),
        ("damaged", 16),
        ("0 100000", 16),
        ("5 0", 16),
    ],
)
def test_a_quota_of_version_2_bounds_the_cores(tmp_path: Path, text: str, cores: int) -> None:
    (tmp_path / "cpu.max").write_text(f"{text}\n")
    assert count_cores(tmp_path) == cores


@pytest.mark.usefixtures("sixteen_cores")
@pytest.mark.parametrize(("quota", "cores"), [("-1", 16), ("400000", 4), ("50000", 1)])
def test_a_quota_of_version_1_bounds_the_cores(tmp_path: Path, quota: str, cores: int) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert count_cores(tmp_path) == cores


@pytest.mark.usefixtures("sixteen_cores")
def test_without_a_quota_all_cores_of_the_process_count(tmp_path: Path) -> None:
    assert count_cores(tmp_path) == 16


def test_this_process_has_a_core_at_least() -> None:
    assert 1 <= count_cores() <= (os.cpu_count() or 1)
