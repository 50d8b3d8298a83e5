"""A training that is killed again and again, resumed each time, and held against one that was never stopped."""

import json
import os
import shutil
import signal
import socket
import time
import warnings
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import mlflow

from tests import warm
from tests.end_to_end.killed_rank import Job, KillPoint, train_rank
from tests.train.tiny import tiny_config
from train.saving.checkpoint import MODEL, OPTIMIZER, RNG, find_newest

_MOMENT_S = 0.3  # between the death of one rank and that of the others
_DEADLINE_S = 240.0


@dataclass
class Chain:
    """One run in a folder of its own, that goes on by `--resume auto` after each kill.

    Attributes:
        folder: Holds the recipe, the store, the runs and what each rank notes.
        world_size: Ranks.
        fault: One of FAULTS, that every process of it has.
        killed: The points at which it was killed.
        early: How often it was killed before its first checkpoint, when there was nothing to go on from.
    """

    folder: Path
    world_size: int
    fault: str = ""
    killed: list[KillPoint] = field(default_factory=list)
    early: int = 0

    def advance(self, point: KillPoint | None = None) -> bool:
        """Start all ranks; return True if the run ended well, False if it was killed at `point`.

        Raises:
            AssertionError: If a rank ended otherwise; with what it printed.
        """
        arguments = ("recipe.yaml", "--resume", "auto")
        given = (self.world_size, free_port(), self.folder, arguments, point, self.fault)
        ranks = [
            warm.start(train_rank, Job(rank, *given), environ=os.environ, log=self.folder / f"rank{rank}.log")
            for rank in range(self.world_size)
        ]
        try:
            self._wait(ranks, point)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        codes = [process.exitcode for process in ranks]
        if codes == [0] * self.world_size:
            return True
        assert point is not None, f"{self.describe()} ended with {codes}\n{self.printed()}"
        assert -signal.SIGKILL in codes, f"{self.describe()} ended with {codes}\n{self.printed()}"
        self.killed.append(point)
        self.early += find_newest(self.folder / "runs" / "tiny") is None
        return False

    def _wait(self, ranks: list[ForkServerProcess], point: KillPoint | None) -> None:
        """Wait until all ranks have ended well, or one has not, or the time of a kill has come."""
        start = time.monotonic()
        patience_s = point.count / 1000 if point is not None and point.where == "time" else _DEADLINE_S
        while left := [process.sentinel for process in ranks if process.is_alive()]:
            connection.wait(left, timeout=max(0.0, start + patience_s - time.monotonic()))
            if time.monotonic() >= start + patience_s:
                assert point is not None, f"{self.describe()} still ran after {_DEADLINE_S} s\n{self.printed()}"
                return
            if any(process.exitcode for process in ranks):
                time.sleep(_MOMENT_S if point is not None and point.alone else 0)
                return

    def describe(self) -> str:
        """Say what happened to it until now."""
        return f"{self.world_size} ranks, killed at [{'; '.join(map(str, self.killed))}]"

    def printed(self) -> str:
        """Return the end of what each rank has printed."""
        logs = sorted(self.folder.glob("rank*.log"))
        return "".join(f"\n--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)

    def steps(self, rank: int) -> dict[int, dict[str, object]]:
        """Return what a rank has noted of each step.

        Raises:
            AssertionError: If a step that was taken again was another.
        """
        noted: dict[int, dict[str, object]] = {}
        for line in (self.folder / f"steps{rank}.jsonl").read_text(encoding="utf-8").splitlines():
            note = json.loads(line)
            first = noted.setdefault(note["step"], note)
            assert note == first, f"{self.describe()}: rank {rank} took another step {note['step']} the second time"
        return noted

    def histories(self) -> dict[str, list[tuple[int, float]]]:
        """Return step and value of all metrics but throughput.

        Raises:
            AssertionError: If not one MLflow run alone was trained, and ended well.
        """
        client = mlflow.MlflowClient(f"sqlite:///{self.folder}/mlflow.db")
        runs = client.search_runs([client.get_experiment_by_name("attention-zoo").experiment_id])
        trained = [run for run in runs if run.data.metrics]
        assert len(trained) == 1, f"{self.describe()}: {len(trained)} MLflow runs hold metrics"
        assert len(runs) - 1 <= self.early, f"{self.describe()}: {len(runs)} MLflow runs"
        assert trained[0].info.status == "FINISHED", f"{self.describe()}: {trained[0].info.status}"
        keys = sorted(key for key in trained[0].data.metrics if not key.startswith("perf/"))
        return {
            key: [(metric.step, metric.value) for metric in client.get_metric_history(trained[0].info.run_id, key)]
            for key in keys
        }

    def differences(self, straight: "Chain") -> list[str]:
        """Return in what the end of this run differs from that of one that was never stopped."""
        found = []
        mine, theirs = (find_newest(chain.folder / "runs" / "tiny") for chain in (self, straight))
        assert mine is not None
        assert theirs is not None
        for name in (MODEL, OPTIMIZER, RNG):
            if (mine / name).read_bytes() != (theirs / name).read_bytes():
                found.append(name)
        for rank in range(self.world_size):
            if self.steps(rank) != straight.steps(rank):
                found.append(f"images or rates of rank {rank}")
        told, expected = self.histories(), straight.histories()
        found += [f"{key}: {told.get(key)} and {expected[key]}" for key in expected if told.get(key) != expected[key]]
        left, kept = (sorted(path.name for path in one.parent.iterdir()) for one in (mine, theirs))
        if left != kept:
            found.append(f"left-over files {left}")
        return found


def begin(folder: Path, world_size: int, images: Path, empty_store: Path, *, fault: str = "") -> Chain:
    """Lay out a run: dropout, two micro-batches a step, intervals that do not divide the epoch."""
    folder.mkdir(parents=True)
    shutil.copy(empty_store, folder / "mlflow.db")
    config = tiny_config(
        images,
        **{"model__timm_kwargs": {"drop_rate": 0.2, "proj_drop_rate": 0.2, "attn_drop_rate": 0.1}},
        output_dir=str(folder / "runs"),
        tracking__uri=f"sqlite:///{folder}/mlflow.db",
        schedule__epochs=3,
        loop__batch_size_per_rank=1,
        loop__accumulation_steps=2,
        log__every_steps=3,
        checkpoint__every_steps=2,
        publish__enabled=False,
    )
    (folder / "recipe.yaml").write_text(config.model_dump_json(), encoding="utf-8")  # JSON is YAML
    return Chain(folder, world_size, fault)


def make_store(file: Path) -> Path:
    """Make an SQLite store without runs: MLflow takes seconds for it, and a copy none."""
    before = mlflow.get_tracking_uri()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # MLflow's own use of SQLAlchemy
        mlflow.MlflowClient(f"sqlite:///{file}").search_experiments()
    mlflow.set_tracking_uri(before)
    return file


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
