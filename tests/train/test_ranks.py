import subprocess
import sys
from types import SimpleNamespace

import pytest
from accelerate import Accelerator

from train.errors import (
    CheckpointError,
    ConfigError,
    NonFiniteLoss,
    ReplicaMismatch,
    TrainError,
    WorldSizeError,
    exit_status,
)
from train.ranks import check_devices, check_world, describe_ranks, gather_json, together
from zoo.errors import AuditError, SwapError, UnknownNameError


@pytest.fixture
def alone() -> Accelerator:
    return Accelerator(cpu=True)


def talk(accelerator: Accelerator) -> dict[str, object]:
    """Run every case on a real rank; each gives what it gathered or the error it raised."""
    rank = accelerator.process_index
    mistakes = {
        "alike on all": {0: ConfigError("steps is 0"), 1: ConfigError("steps is 0")},
        "on the last": {1: SwapError("blocks.0.attn: cannot swap")},
        "different": {0: ConfigError("no such folder: a"), 1: ConfigError("no such folder: b")},
        "made from more than a message": {1: UnknownNameError("recipe", "digit", ["digits"])},
        "of no user's making": {1: KeyError("lost")},
        "without a message": {1: RuntimeError()},
    }
    heard: dict[str, object] = {}
    for case, planted in mistakes.items():
        try:
            with together(accelerator, "planting"):
                if rank in planted:
                    raise planted[rank]
            heard[case] = "passed"
        except Exception as error:
            heard[case] = [type(error).__name__, str(error)]
    with together(accelerator, "planting"):
        heard["no fault"] = "passed"
    heard["json"] = gather_json({"rank": rank, "text": "日本" * (1 + 500 * rank), "none": None}, accelerator)
    heard["ranks"] = [str(info).partition(" host=")[0] for info in describe_ranks(accelerator)]
    return heard


@pytest.fixture(scope="module")
def heard(run_ranks) -> dict[str, object]:
    first, second = run_ranks(talk)
    assert not first.error, first.traceback
    assert first.value == second.value
    return first.value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "kind", "message"),
    [
        ("alike on all", "ConfigError", "steps is 0"),
        ("on the last", "SwapError", "blocks.0.attn: cannot swap (rank 1 of 2, planting)"),
        (
            "different",
            "ConfigError",
            "planting failed on 2 of 2 ranks\n  rank 0: no such folder: a\n  rank 1: no such folder: b",
        ),
        (
            "made from more than a message",
            "ZooError",
            "unknown recipe 'digit', did you mean 'digits'? (rank 1 of 2, planting)",
        ),
        ("of no user's making", "LookupError", "'lost' (rank 1 of 2, planting)"),
        ("without a message", "RuntimeError", "RuntimeError() (rank 1 of 2, planting)"),
    ],
)
def test_every_rank_raises_what_one_rank_met(heard, case, kind, message) -> None:
    assert heard[case] == [kind, message]


@pytest.mark.slow
def test_work_that_succeeds_everywhere_goes_on(heard) -> None:
    assert heard["no fault"] == "passed"


@pytest.mark.slow
def test_json_of_any_length_and_script_is_gathered_in_rank_order(heard) -> None:
    assert heard["json"] == [{"rank": rank, "text": "日本" * (1 + 500 * rank), "none": None} for rank in range(2)]


@pytest.mark.slow
def test_ranks_are_described_in_order(heard) -> None:
    assert heard["ranks"] == [f"rank={rank} device=cpu backend=gloo" for rank in range(2)]


def test_world_of_one_speaks_with_itself(alone) -> None:
    assert gather_json({"a": (1, 2)}, alone) == [{"a": [1, 2]}]
    (info,) = describe_ranks(alone)
    assert (info.rank, info.local_rank, info.device, info.backend) == (0, 0, "cpu", "none")
    with pytest.raises(KeyError, match="lost"), together(alone, "planting"):
        raise KeyError("lost")


def world(num_processes: int) -> SimpleNamespace:
    """All that `check_world` reads of an Accelerator: a world of N cannot be had without N processes."""
    return SimpleNamespace(num_processes=num_processes)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"])
def test_processes_that_do_not_see_each_other_never_train(alone, name) -> None:
    with pytest.raises(
        WorldSizeError, match=r"started 2 processes, but rank 1 sees 1: each would train alone.*cpu=True"
    ):
        check_world(alone, {name: "2", "RANK": "1"}, [])
    check_world(world(2), {name: "2"}, [])


@pytest.mark.parametrize(
    "launcher",
    [
        ["/venv/bin/python", "/venv/bin/accelerate", "launch"],
        ["/venv/bin/python3.11", "-u", "-m", "accelerate.commands.launch"],
        ["python", "-m", "accelerate.commands.accelerate_cli", "launch"],
        ["accelerate-launch"],
    ],
)
@pytest.mark.parametrize("asked", [["--num_processes", "2"], ["--num-processes=2"], ["--num_processes=2"]])
def test_launch_line_that_starts_one_of_two_processes_is_refused(alone, launcher, asked) -> None:
    line = [*launcher, "--cpu", *asked, "-m", "train", "digits", "--num_processes", "9"]
    with pytest.raises(WorldSizeError) as caught:
        check_world(alone, {}, line)
    assert "asked for 2 processes and started 1" in str(caught.value)
    assert str(caught.value).endswith("accelerate launch --multi_gpu --num_processes 2 -m train ...")


def test_launch_config_that_starts_one_of_three_processes_is_refused(alone, tmp_path) -> None:
    config = tmp_path / "launch.yaml"
    config.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nnum_processes: 3\n")
    line = ["accelerate", "launch", "--config_file", str(config), "job.py"]
    with pytest.raises(WorldSizeError, match=r"asked for 3 processes and started 1.*--num_processes 3 job.py"):
        check_world(alone, {}, line)
    check_world(alone, {}, [*line[:4], "--num_processes", "1", "job.py"])
    check_world(world(3), {}, line)


@pytest.mark.parametrize(
    "line",
    [
        [],
        ["bash"],
        ["/venv/bin/python", "-m", "pytest", "accelerate", "launch", "--num_processes", "2"],
        ["python", "-m", "train.study", "--num_processes", "2"],
        ["accelerate", "config", "--num_processes", "2"],
        ["/venv/bin/python", "/venv/bin/torchrun", "--nproc-per-node", "2", "-m", "train"],
        ["accelerate", "launch", "--num_processes", "1", "-m", "train", "--num_processes", "2"],
    ],
)
def test_other_parents_raise_no_alarm(alone, line) -> None:
    check_world(alone, {}, line)


def test_plain_python_raises_no_alarm(alone) -> None:
    check_world(alone, {})


def test_torchrun_of_two_raises_no_alarm() -> None:
    check_world(world(2), {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0"})


def test_more_processes_than_gpus_is_refused_with_the_count_that_fits() -> None:
    with pytest.raises(WorldSizeError, match=r"8 processes .* 2 GPUs: launch with --num_processes 2"):
        check_devices({"LOCAL_WORLD_SIZE": "8"}, num_gpus=2)


@pytest.mark.parametrize(
    ("environ", "num_gpus"),
    [
        ({"LOCAL_WORLD_SIZE": "2"}, 2),
        ({"LOCAL_WORLD_SIZE": "8"}, 0),
        ({"LOCAL_WORLD_SIZE": "8", "ACCELERATE_USE_CPU": "true"}, 2),
        ({}, 1),
    ],
)
def test_processes_that_fit_the_machine_pass(environ, num_gpus) -> None:
    check_devices(environ, num_gpus=num_gpus)


SCRIPT = """
import os
from accelerate import Accelerator
from train.errors import exit_status
from train.ranks import check_world
accelerator = Accelerator({options})
try:
    check_world(accelerator, os.environ)
    os.write(1, f"trained {{accelerator.num_processes}}\\n".encode())  # whole, whatever the other rank writes
except ValueError as error:
    print("refused:", error, flush=True)
    raise SystemExit(exit_status(error)) from None
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "options", "printed"),
    [
        (["--multi_gpu"], "", "sees 1: each would train alone"),
        (["--cpu"], "cpu=True", "accelerate launch --multi_gpu --num_processes 2"),
        (["--multi_gpu"], "cpu=True", "trained 2"),
    ],
)
def test_real_launcher(tmp_path, launcher, options, printed) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT.format(options=options))
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--main_process_port", "0"]
    environ = {"PYTHONPATH": ".", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*launch, *launcher, "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", str(script)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert printed in done.stdout, done.stderr
    assert (done.returncode == 0) == printed.startswith("trained"), done.stderr
    assert ("trained" in done.stdout) == printed.startswith("trained")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (TrainError("x"), 2),
        (WorldSizeError("x"), 2),
        (CheckpointError("x"), 2),
        (SwapError("x"), 2),
        (AuditError("x"), 3),
        (ReplicaMismatch("x"), 3),
        (NonFiniteLoss("x"), 3),
        (RuntimeError("x"), 1),
        (KeyboardInterrupt(), 1),
    ],
)
def test_exit_status_tells_a_mistake_from_a_fault(error, status) -> None:
    assert exit_status(error) == status
