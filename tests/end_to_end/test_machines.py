"""Training over two machines: to the end, through the loss of either and of the cable between, and from bad starts."""

import re
import shutil
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.machines import ROOT, Job, Machines, NoNamespaces, two_machines
from tests.train.tiny import write_images

SILENCE_S, EPOCHS, STEPS = 5, 12, 216  # 72 images on two ranks of two: 18 steps an epoch
RECIPE = f"""
name: tiny
model:
  backbone: vit_tiny_patch16_224
  attention: parameter
  timm_kwargs: {{img_size: 8, patch_size: 4, embed_dim: 16, depth: 1, num_heads: 2}}
data: {{root: images}}
optimizer: {{lr: 1e-2}}
schedule: {{epochs: {EPOCHS}, warmup_epochs: 1}}
loop: {{batch_size_per_rank: 2}}
log: {{every_steps: 6, progress: false}}
checkpoint: {{keep: 3}}
watch: {{silence_s: {SILENCE_S}}}
publish: {{enabled: false}}
"""

pytestmark = pytest.mark.slow

Make = Callable[..., AbstractContextManager[Machines]]


@pytest.fixture(scope="module")
def make(shell: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Make:
    """`with make(shared=...) as machines` gives two machines, each with recipe and images on its disk."""
    environ = shell | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

    @contextmanager
    def made(*, shared: bool = False) -> Iterator[Machines]:
        try:
            with two_machines(tmp_path_factory.mktemp("machines"), environ, shared=shared) as machines:
                for disk in {machine.disk for machine in machines.both}:
                    write_images(disk / "images", train=24)
                    (disk / "tiny.yaml").write_text(RECIPE, encoding="utf-8")
                yield machines
        except NoNamespaces as error:
            pytest.skip(str(error))

    return made


@pytest.fixture(scope="module")
def whole(make: Make) -> Iterator[tuple[Machines, list[Job]]]:
    """A training to its end on two machines that share nothing but the cable."""
    with make() as machines:
        jobs = machines.launch_both("tiny.yaml")
        assert [job.wait(120) for job in jobs] == [0, 0], "\n".join(job.text for job in jobs)
        yield machines, jobs


def errors(job: Job) -> list[str]:
    """Return the lines in which a command told what went wrong, each with those that belong to it."""
    return re.findall(r"^(?:rank \d+: )?error: .*(?:\n  \S.*)*", job.text, re.MULTILINE)


def runs(disk: Path) -> list[tuple[str, str]]:
    """Return status and tag `failure` of every MLflow run on a disk."""
    with sqlite3.connect(disk / "mlflow.db") as store:
        failures = dict(store.execute("SELECT run_uuid, value FROM tags WHERE key = 'failure'"))
        return [(status, failures.get(run, "")) for run, status in store.execute("SELECT run_uuid, status FROM runs")]


def last_checkpoint(disk: Path) -> tuple[str, bytes, bytes]:
    """Return name, weights and optimizer state of the newest checkpoint on a disk."""
    path = max(disk.glob("runs/tiny/*/checkpoints/step-*"), key=lambda path: path.name)
    return path.name, (path / "model.safetensors").read_bytes(), (path / "optimizer.safetensors").read_bytes()


def files(disk: Path) -> set[str]:
    """Return what lies on a disk, but for the images."""
    return {str(path.relative_to(disk)) for path in disk.rglob("*") if path.is_file() and path.suffix != ".png"}


def sleepers() -> list[str]:
    """Return what this file's `sleep` commands are called that still run, anywhere on this machine."""
    lines = (process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"]))
    return [line[1] for line in lines if line[:1] == ["sleep"] and line[1].startswith("777")]


def test_everything_ends_with_the_block_also_what_was_started_and_forgotten(make: Make) -> None:
    before = set(psutil.Process().children(recursive=True))
    with make() as machines:
        job = machines[1].start(["sh", "-c", "setsid sleep 7771 & sleep 7772 & echo started; sleep 7773"], {})
        job.wait_for("started")
        assert {"sleep 7771", "sleep 7772"} <= set(machines[1].processes())
        assert machines[0].processes() == []
        disks = str(machines[0].desk.parent)
    assert sleepers() == []
    assert disks not in Path("/proc/self/mounts").read_text()
    assert set(psutil.Process().children(recursive=True)) <= before


def test_everything_ends_with_the_process_that_made_it(make: Make, tmp_path: Path) -> None:
    with make():
        """Skip where there can be none."""
    code = f"""
        import time
        from pathlib import Path
        from tests.end_to_end.machines import two_machines
        with two_machines(Path({str(tmp_path)!r}), {{}}, shared=True) as machines:
            machines[0].start(["sleep", "7774"], {{}})
            print(*[machine.first for machine in machines.both], flush=True)
            time.sleep(600)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        firsts = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        process.kill()
    gone, alive = psutil.wait_procs(firsts, timeout=10)
    assert (len(gone), alive, sleepers()) == (2, [], [])


def test_two_machines_train_as_one_and_say_where(whole: tuple[Machines, list[Job]]) -> None:
    machines, (first, second) = whole
    for line in (
        r"ranks     2 ranks on 2 machines, backend gloo: machine0 \(rank 0 on cpu\), machine1 \(rank 1 on cpu\)",
        r"writes    machine0 alone, runs/tiny and the MLflow run in sqlite:///mlflow\.db; nothing on machine1",
        r"replicas  before wrap: 2 ranks are equal",
        r"result    top-1 ",
    ):
        assert len(re.findall(f"^{line}", first.text, re.MULTILINE)) == 1, f"{line}\n{first.text}"
    assert "ranks     " not in second.text
    assert runs(machines[0].disk) == [("FINISHED", "")], "two machines, one run"
    assert last_checkpoint(machines[0].disk)[0] == f"step-{STEPS:08d}"


def test_nothing_is_written_on_the_other_machine(whole: tuple[Machines, list[Job]]) -> None:
    machines, _ = whole
    assert files(machines[1].disk) == {"tiny.yaml"}
    assert files(machines[0].disk) > {"tiny.yaml", "mlflow.db"}


def test_lost_machine_ends_the_run_and_both_go_on_to_the_same_bits(
    make: Make, whole: tuple[Machines, list[Job]]
) -> None:
    with make(shared=True) as machines:
        first, _ = machines.launch_both("tiny.yaml")
        first.wait_for("epoch=3/")
        machines[1].switch_off()
        assert first.wait(SILENCE_S + 30) == 1
        (told,) = errors(first)
        assert re.match(r"error: rank 1 \(pid \d+ on machine1\) ", told)
        assert first.text.index(told) < first.text.index("ChildFailedError"), "the first cause stands above all"
        assert machines[0].processes() == []
        ((status, failure),) = runs(machines[0].disk)
        assert status == "FAILED"
        assert failure.startswith("rank 1 (pid")
        machines[1].switch_on()
        jobs = machines.launch_both("tiny.yaml", "--resume", "auto")
        assert [job.wait(120) for job in jobs] == [0, 0], "\n".join(job.text for job in jobs)
        assert "from runs/tiny" in jobs[0].text
        assert runs(machines[0].disk) == [("FINISHED", "")]
        assert last_checkpoint(machines[0].disk) == last_checkpoint(whole[0][0].disk)


def test_loss_of_the_main_machine_ends_the_other(make: Make) -> None:
    with make() as machines:
        first, second = machines.launch_both("tiny.yaml")
        first.wait_for("epoch=2/")
        machines[0].switch_off()
        assert second.wait(SILENCE_S + 30) == 1
        (told,) = errors(second)
        assert re.match(r"error: rank 0 \(pid \d+ on machine0\) ", told)
        assert "is not marked: its store is a file on the main process's machine" in second.text
        assert machines[1].processes() == []
        assert files(machines[1].disk) == {"tiny.yaml"}


def test_cut_cable_ends_both_and_one_goes_on_alone(make: Make) -> None:
    with make() as machines:
        jobs = machines.launch_both("tiny.yaml")
        jobs[0].wait_for("epoch=3/")
        machines.cut()
        assert [job.wait(SILENCE_S + 30) for job in jobs] == [1, 1]
        for job, lost in zip(jobs, (r"rank 1 \(pid \d+ on machine1\)", r"rank 0 \(pid \d+ on machine0\)"), strict=True):
            (told,) = errors(job)
            assert re.match(f"error: {lost}", told)
        assert [machine.processes() for machine in machines.both] == [[], []]
        assert runs(machines[0].disk)[0][0] == "FAILED"
        alone = machines.launch(0, "tiny.yaml", "--resume", "auto", num_processes=1, num_machines=1)
        assert alone.wait(120) == 0, alone.text
        assert re.search(r"^changed   .*ranks", alone.text, re.MULTILINE), alone.text
        assert runs(machines[0].disk) == [("FINISHED", "")]


def test_machines_that_disagree_are_told_in_what(make: Make, tmp_path: Path) -> None:
    for package in ("train", "zoo", "serve"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "train" / "optim.py").open("a") as file:
        file.write("# another commit\n")
    with make() as machines:
        jobs = [
            machines.launch(0, "tiny.yaml"),
            machines.launch(1, "tiny.yaml", "--seed", "1", PYTHONPATH=str(tmp_path)),
        ]
        assert [job.wait(300) for job in jobs] == [1, 1]
        (told,) = errors(jobs[0])
        assert re.search(r"\n  config: seed: .*machine1", told)
        assert re.search(r"\n  code: train/optim\.py: .*machine1", told)
        assert not list(machines[0].disk.glob("runs/*/*")), "nothing was begun"


def test_machine_that_draws_other_weights_is_named(make: Make) -> None:
    plugin = """
        import socket
        import torch
        import zoo

        @zoo.register_attention("local")
        class LocalAttention(zoo.Attention):
            projection = "parameter"

            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                number = float(socket.gethostname().removeprefix("machine"))
                self.temperature = torch.nn.Parameter(torch.tensor([1.0 + number]))

            def attend(self, q, k, v, **masks):
                return super().attend(q * self.temperature, k, v, **masks)
    """
    with make(shared=True) as machines:
        (machines[0].disk / "local.py").write_text(textwrap.dedent(plugin))
        jobs = machines.launch_both("tiny.yaml", "--model.plugins", "local.py", "--model.attention", "local")
        assert [job.wait(300) for job in jobs] == [1, 1]
        for job in jobs:
            (told,) = errors(job)
            assert "blocks.0.attn.temperature: bytes differ" in told
            assert "rank 1 on machine1" in told


def test_data_that_one_machine_lacks_are_told_with_its_name(make: Make) -> None:
    with make() as machines:
        shutil.rmtree(machines[1].disk / "images")
        jobs = machines.launch_both("tiny.yaml")
        assert [job.wait(300) for job in jobs] == [1, 1]
        for job in jobs:
            (told,) = errors(job)
            assert re.match(r"error: data\.root images: no such folder \(rank 1 .*rank 1 on machine1", told)
        assert files(machines[0].disk) == {"tiny.yaml"}, "nothing was begun"


def test_machines_launched_for_different_worlds_do_not_train(make: Make) -> None:
    with make() as machines:
        jobs = [machines.launch(0, "tiny.yaml", num_processes=2), machines.launch(1, "tiny.yaml", num_processes=4)]
        assert [job.wait(300) for job in jobs] == [1, 1]
        for job in jobs:
            assert "asked for different numbers of processes: 2 on machine0 (machine 0), 4 on machine1" in job.text


def test_machine_that_never_comes_is_waited_for_as_long_as_was_said(make: Make) -> None:
    with make() as machines:
        job = machines.launch(0, "tiny.yaml", launcher=("--rdzv_conf", "timeout=2"))
        assert job.wait(300) == 1
        assert "waiting for clients. 1/2 clients joined" in job.text
