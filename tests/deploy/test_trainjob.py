"""deploy/trainjob.yaml: the command of its pods, run as two processes with the environment that Trainer gives them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.postgres import free_port

ROOT = Path(__file__).parent.parent.parent
IMAGE = {"/opt/attention-zoo/launch": ROOT / "deploy" / "launch"}
"""Where the Dockerfile puts what is called here."""


def read_trainer() -> dict[str, Any]:
    documents = yaml.safe_load_all((ROOT / "deploy" / "trainjob.yaml").read_text(encoding="utf-8"))
    trainer: dict[str, Any] = next(each for each in documents if each["kind"] == "TrainJob")["spec"]["trainer"]
    return trainer


def pod_environment(trainer: dict[str, Any], node: int, port: int) -> dict[str, str]:
    """Return what Trainer's torch plugin puts into the pod of a node, and the job's own; for this machine's address."""
    return {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_NODE_RANK": str(node),
        "PET_MASTER_ADDR": "127.0.0.1",  # there: digits-node-0-0.digits
        "PET_MASTER_PORT": str(port),
    } | {each["name"]: each["value"] for each in trainer["env"]}


@pytest.fixture
def pods(tmp_path: Path, shell: dict[str, str], empty_store: Path) -> Iterator[list["subprocess.Popen[str]"]]:
    """Both pods' containers, started together on the claim that they share, with a store beside it."""
    trainer, port = read_trainer(), free_port()
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    words = [str(tmp_path / "runs") if word == "/training/runs" else word for word in trainer["args"]]
    started = []
    for node in range(trainer["numNodes"]):
        environ = shell | pod_environment(trainer, node, port)
        environ |= {"ACCELERATE_CONFIG": str(ROOT / "accelerate_config.yaml"), "OMP_NUM_THREADS": "1"}
        environ |= {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}
        environ |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"}
        (command,) = trainer["command"]
        short = ["--schedule.epochs", "1", "--schedule.warmup_epochs", "0", "--publish.enabled", "false"]
        started.append(
            subprocess.Popen(
                [IMAGE[command], *words, *short],
                cwd=tmp_path,
                env=environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    yield started
    for pod in started:
        pod.terminate()
        pod.wait(60)


def test_the_image_has_the_command_where_the_job_calls_it():
    trainer = read_trainer()
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert f'ENTRYPOINT ["{trainer["command"][0]}"]' in dockerfile
    assert "WORKDIR /opt/attention-zoo\n" in dockerfile
    assert "COPY accelerate_config.yaml deploy/launch ./\n" in dockerfile
    assert dockerfile.rstrip().endswith('ENTRYPOINT ["python", "-m", "serve"]'), (
        "the last stage is what a plain build gives"
    )


@pytest.mark.slow
def test_two_pods_train_as_one_world(pods, tmp_path):
    said = [pod.communicate(timeout=300)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], "\n".join(said)
    assert "ranks     2 ranks on 2 machines, backend gloo" in said[0]
    assert "result    top-1" in said[0]
    assert "result" not in said[1]
    assert len(list((tmp_path / "runs" / "digits").glob("*/checkpoints"))) == 1
