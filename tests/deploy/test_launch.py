"""deploy/launch, the train image's entry point: which `accelerate launch` it makes of the environment."""

import os
import subprocess
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parent.parent.parent / "deploy" / "launch"
CONFIG = ("--config_file", "/opt/attention-zoo/accelerate_config.yaml")
MACHINE = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "digits-node-0-0.digits",
}


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A PATH on which `accelerate` says its words, one a line, and `python` counts three GPUs."""
    for name, text in (("accelerate", 'printf "%s\\n" "$@"'), ("python", "echo 3")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def launch(commands: Path, *words: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    kept = {"PATH": f"{commands}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run([LAUNCH, *words], env=kept | environ, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "--num_machines 1 --num_processes 3"),
        ({"PET_NPROC_PER_NODE": "auto"}, "--num_machines 1 --num_processes 3"),
        ({"PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "0"}, "--num_machines 1 --num_processes 2"),
        (
            MACHINE,
            "--num_machines 2 --num_processes 8 --machine_rank 1 "
            "--main_process_ip digits-node-0-0.digits --main_process_port 29500",
        ),
        (
            MACHINE | {"PET_MASTER_PORT": "1234", "PET_NPROC_PER_NODE": "auto"},
            "--num_machines 2 --num_processes 6 --machine_rank 1 "
            "--main_process_ip digits-node-0-0.digits --main_process_port 1234",
        ),
    ],
)
def test_environment_becomes_options(commands, environ, expected):
    done = launch(commands, "digits", "--name", "two words", **environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "launch",
        *CONFIG,
        *expected.split(),
        "-m",
        "train",
        "digits",
        "--name",
        "two words",
    ]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"PET_NNODES": "two"}, "PET_NNODES=two PET_NPROC_PER_NODE=4: wanted two whole numbers from 1"),
        ({"PET_NNODES": "0"}, "PET_NNODES=0 PET_NPROC_PER_NODE=4: wanted"),
        ({"PET_NNODES": "1:4"}, "PET_NNODES=1:4 PET_NPROC_PER_NODE=4: wanted"),
        ({"PET_NPROC_PER_NODE": "gpu"}, "PET_NPROC_PER_NODE=gpu: wanted"),
        ({"PET_NPROC_PER_NODE": "0"}, "PET_NPROC_PER_NODE=0: wanted"),
        ({"PET_NODE_RANK": ""}, "PET_NODE_RANK: the number of this machine, from 0"),
        ({"PET_MASTER_ADDR": ""}, "PET_MASTER_ADDR: the name or address of machine 0"),
    ],
)
def test_environment_that_makes_no_world_is_refused_by_name(commands, changed, said):
    done = launch(commands, "digits", **(MACHINE | changed))
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stdout == ""
