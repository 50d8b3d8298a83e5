"""deploy/slurm.sbatch, run by stand-ins for SLURM's commands: two nodes of this machine that form one real world."""

import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.slurm_cluster import JOB, Job, write_command
from tests.train.tiny import tiny_config, write_images

ROOT = Path(__file__).parent.parent.parent
# a launcher that says its words and then waits for its end, for what the script itself does
LAUNCHER = """
echo "$@"
trap 'echo stopped; exit 1' TERM
touch "$CALLS.up$SLURM_NODEID"
while [ ! -e "$CALLS.over" ]; do sleep 0.05; done
"""


@pytest.fixture
def job(tmp_path: Path, shell: dict[str, str]) -> Iterator[Job]:
    (tmp_path / "accelerate_config.yaml").write_bytes((ROOT / "accelerate_config.yaml").read_bytes())
    job = Job(ROOT / "deploy" / "slurm.sbatch", tmp_path, shell)
    yield job
    job.kill()


@pytest.fixture
def waiting(job: Job, tmp_path: Path) -> Job:
    """The job under way, with a launcher on both nodes that only waits."""
    write_command(tmp_path / "bin" / "accelerate", LAUNCHER)
    job.submit("digits", "--name", "two words", SLURM_GPUS_ON_NODE="4")
    job.wait_for(lambda: all((tmp_path / f"calls.up{node}").exists() for node in range(2)))
    return job


def requeued(job: Job) -> bool:
    return f"scontrol requeue {JOB}" in job.calls


def test_each_node_launches_its_part_of_one_world(waiting, tmp_path):
    (tmp_path / "calls.over").touch()
    assert waiting.finish() == 0, waiting.said
    for node in range(2):
        assert (tmp_path / f"calls.out{node}").read_text().strip() == (
            f"launch --config_file accelerate_config.yaml --num_machines 2 --machine_rank {node} --num_processes 8 "
            "--main_process_ip 127.0.0.1 --main_process_port 24321 -m train digits --name two words --resume auto"
        )
    assert waiting.calls == ["scontrol show hostnames node[01-02]", "srun --kill-on-bad-exit=0 --cpus-per-task=1"]


def test_time_limit_stops_the_ranks_and_queues_the_job_again(waiting):
    waiting.send(signal.SIGUSR1)
    assert waiting.finish() == 1, waiting.said
    assert waiting.said.count("stopped") == 2
    assert waiting.calls[2:] == [f"scancel --signal TERM {JOB}.0", f"scontrol requeue {JOB}"]


def test_job_that_just_makes_its_time_limit_is_not_queued_again(waiting, tmp_path):
    write_command(tmp_path / "bin" / "scancel", 'touch "$CALLS.over"')
    waiting.send(signal.SIGUSR1)
    assert waiting.finish() == 0, waiting.said
    assert not requeued(waiting)


def test_cancelled_job_waits_for_its_ranks_and_is_not_queued_again(waiting, tmp_path):
    waiting.send(signal.SIGTERM)
    subprocess.run([tmp_path / "bin" / "scancel"], env=waiting.environ, check=True)
    assert waiting.finish() == 1, waiting.said
    assert waiting.said.count("stopped") == 2
    assert not requeued(waiting)


def test_node_that_fails_is_the_job_that_fails(waiting, tmp_path):
    launcher = int((tmp_path / "calls.node1").read_text())
    subprocess.run(["kill", "-s", "KILL", str(launcher)], check=True)
    (tmp_path / "calls.over").touch()
    assert waiting.finish() == 128 + signal.SIGKILL, waiting.said
    assert not requeued(waiting)


@pytest.mark.slow
def test_two_nodes_train_as_one_world_and_go_on_in_the_job_after_a_time_limit(job, tmp_path, empty_store):
    epochs = 100
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    config = tiny_config(
        write_images(tmp_path / "images"),
        publish__enabled=False,
        log__every_steps=10,
        schedule__epochs=epochs,
        evaluate__every_epochs=epochs,
        checkpoint__every_epochs=epochs,
    )
    (tmp_path / "recipe.yaml").write_text(config.model_dump_json())
    job.submit("recipe.yaml")
    job.wait_for(lambda: "step=10/" in job.said)
    job.send(signal.SIGUSR1)
    assert job.finish() != 0, job.said
    assert "ranks     2 ranks on 2 machines, backend gloo" in job.said
    assert requeued(job)
    saved = max((tmp_path / "runs" / "tiny").glob("*/checkpoints/step-*"))
    assert 10 <= int(saved.name.removeprefix("step-")) < 3 * epochs

    job.submit("recipe.yaml")
    assert job.finish() == 0, job.said
    assert saved.name in job.said
    assert len(list((tmp_path / "runs" / "tiny").glob("*/checkpoints"))) == 1, "one run"
    assert list((tmp_path / "runs" / "tiny").glob(f"*/checkpoints/step-{3 * epochs:08d}"))
