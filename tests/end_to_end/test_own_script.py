"""The checks in a script that knows nothing else of this product, through the real launcher."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPT = Path(__file__).parent / "own_script.py"


@pytest.fixture(scope="module")
def run_script(shell, tmp_path_factory):
    """Launch the script on two ranks with one mistake; the finished process, its standard streams as one."""

    def run(mistake: str) -> subprocess.CompletedProcess[str]:
        config = str(ROOT / "accelerate_config.yaml")
        return subprocess.run(
            ["accelerate", "launch", "--config_file", config, str(SCRIPT), "--mistake", mistake],
            cwd=tmp_path_factory.mktemp("own"),
            env={**shell, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )

    return run


@pytest.mark.slow
def test_sound_script_passes(run_script) -> None:
    done = run_script("none")
    assert done.returncode == 0, done.stdout
    assert "replica check before wrap: 2 ranks are equal, tensors=9 bytes=3224" in done.stdout
    assert "trained 12 steps; 5 drift checks" in done.stdout  # after step 1 and each third


@pytest.mark.slow
def test_seed_of_each_ranks_own_before_the_build_stops_every_rank(run_script) -> None:
    done = run_script("seed")
    assert done.returncode != 0
    message = "train.errors.ReplicaMismatch: replica check before wrap: rank 1 of 2 differs from rank 0, 4 of 9 tensors"
    assert 1 <= done.stdout.count(message) <= 2  # once for each rank that could still tell
    assert "trained" not in done.stdout
    assert "  0.weight: bytes differ: " in done.stdout
    assert "a seed of each rank's own belongs after the build" in done.stdout


@pytest.mark.slow
def test_inner_module_is_caught_after_the_first_step(run_script) -> None:
    done = run_script("inner")
    assert done.returncode != 0
    assert "train.errors.ReplicaMismatch: replica check after step 1: rank 1 of 2 differs from rank 0" in done.stdout
    assert "because the inner module was called instead of the wrapped one" in done.stdout
    assert "trained" not in done.stdout


@pytest.mark.slow
def test_processes_that_each_believe_they_are_alone_are_told(run_script) -> None:
    done = run_script("cpu")
    assert done.returncode != 0
    assert "WorldSizeError: the launcher started 2 processes, but rank 0 sees 1: each would train alone" in done.stdout


def test_the_checks_load_nothing_that_a_script_does_not_need() -> None:
    code = "import sys, train.replicas, train.drift, train.equality.agreement; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert {"torch", "accelerate", "train"} <= loaded
    assert loaded & {"mlflow", "fastapi", "sklearn", "serve", "sqlalchemy", "pandas", "timm"} == set()
