"""The server of deploy/mlflow/compose.yaml on a real PostgreSQL: its names, several writers at once, an outage."""

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deploy.postgres import PASSWORD, Cluster
from tests.deploy.test_readme import lines
from tests.deploy.tracking_server import TrackingServer
from tests.train.tiny import tiny_config, write_images

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning"),  # of MLflow's own queries
]
WRITERS, LOSS = 4, "train/loss"
Runs = list[dict[str, Any]]
Start = Callable[..., "Training"]


def write_recipe(folder: Path, **fields: Any) -> Path:
    """Write the tiny training as a recipe, JSON being YAML."""
    write_images(folder / "images")
    recipe = folder / "recipe.yaml"
    recipe.write_text(tiny_config(folder / "images", **fields).model_dump_json())
    return recipe


class Training:
    """`python -m train` on one rank, as a process."""

    def __init__(self, folder: Path, recipe: Path, uri: str, shell: dict[str, str], *words: str) -> None:
        folder.mkdir()
        self._log = folder / "log"
        command = [sys.executable, "-m", "train", str(recipe), "--tracking.uri", uri, "--output_dir", str(folder)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, *words],
                cwd=folder,
                env=shell | {"OMP_NUM_THREADS": "1", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"},
                stdout=log,
                stderr=log,
            )

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def wait_for(self, what: Callable[[], Any]) -> None:
        """Wait until something is true; fail if the training ends before."""
        deadline = time.monotonic() + 300
        while not what():
            assert self._process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.05)

    def finish(self) -> str:
        """Wait for the end, which must be a good one; return what it said."""
        assert self._process.wait(600) == 0, self.said
        return self.said

    @property
    def said(self) -> str:
        return self._log.read_text(encoding="utf-8")


@pytest.fixture
def train(shell: dict[str, str]) -> Iterator[Start]:
    """Start trainings; none outlives the test."""
    started = []

    def start(folder: Path, recipe: Path, uri: str, *words: str) -> Training:
        started.append(Training(folder, recipe, uri, shell, *words))
        return started[-1]

    yield start
    for training in started:
        training.kill()


def call(uri: str, path: str, **body: Any) -> Any:
    """Ask MLflow's REST API: GET where nothing is to be sent."""
    url = f"{uri}/api/2.0/mlflow/{path}"
    answer = httpx.post(url, json=body, timeout=60) if body else httpx.get(url, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def find_runs(uri: str, experiment: str) -> Runs:
    found = call(uri, f"experiments/get-by-name?experiment_name={experiment}")["experiment"]["experiment_id"]
    runs: Runs = call(uri, "runs/search", experiment_ids=[found]).get("runs", [])
    return runs


def steps(uri: str, run_id: str, key: str) -> list[int]:
    history = call(uri, f"metrics/get-history?run_id={run_id}&metric_key={key}&max_results=20000")
    return sorted(int(metric.get("step", 0)) for metric in history.get("metrics", []))


def test_it_answers_to_its_names_alone(server: TrackingServer) -> None:
    path = "/api/2.0/mlflow/experiments/get-by-name?experiment_name=Default"
    port = server.uri.rpartition(":")[2]
    answers = {
        host: httpx.get(server.uri + path, headers={"Host": host}, timeout=60).status_code
        for host in (f"localhost:{port}", f"127.0.0.1:{port}", "mlflow:5000", "zoo.test:5000", "other.test:5000")
    }
    assert list(answers.values()) == [200, 200, 200, 200, 403], answers
    assert httpx.get(f"{server.uri}/health", headers={"Host": "10.1.2.3:5000"}, timeout=60).status_code == 200


def test_the_readmes_first_training_finds_it(server: TrackingServer, tmp_path: Path, shell: dict[str, str]) -> None:
    (command,) = lines("python -m train")
    environ = shell | {"MLFLOW_TRACKING_URI": server.uri, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(shlex.split(command), cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "dry run   everything is in place" in done.stdout


def test_several_trainings_at_once_share_experiment_and_model(
    server: TrackingServer, tmp_path: Path, train: Start
) -> None:
    recipe = write_recipe(tmp_path, name="many", tracking__experiment="many")
    trainings = [train(tmp_path / str(seed), recipe, server.uri, "--seed", str(seed)) for seed in range(WRITERS)]
    for training in trainings:
        training.finish()

    runs = find_runs(server.uri, "many")
    assert [run["info"]["status"] for run in runs] == ["FINISHED"] * WRITERS
    for run in runs:
        assert steps(server.uri, run["info"]["run_id"], LOSS) == list(range(1, 13))
        assert steps(server.uri, run["info"]["run_id"], "val/top1") == [6, 12]
        assert run["info"]["artifact_uri"].startswith("mlflow-artifacts:/")
    assert len(list(server.artifacts.rglob("config.json"))) >= WRITERS

    model = call(server.uri, "registered-models/get?name=many")["registered_model"]
    versions = call(server.uri, "model-versions/search?filter=name%3D'many'")["model_versions"]
    assert sorted(version["version"] for version in versions) == [str(number + 1) for number in range(WRITERS)]
    assert len({version["run_id"] for version in versions}) == WRITERS
    scores = {
        version["version"]: float(next(tag["value"] for tag in version["tags"] if tag["key"] == "val/top1"))
        for version in versions
    }
    champion = {alias["alias"]: alias["version"] for alias in model["aliases"]}["champion"]
    assert scores[champion] == max(scores.values()), f"champion {champion} of {scores}"


def test_metrics_of_an_outage_arrive_and_the_run_finishes(server: TrackingServer, tmp_path: Path, train: Start) -> None:
    epochs = 20
    recipe = write_recipe(
        tmp_path,
        name="outage",
        tracking__experiment="outage",
        publish__enabled=False,
        schedule__epochs=epochs,
        evaluate__every_epochs=epochs,
        checkpoint__every_epochs=epochs,
    )
    call(server.uri, "experiments/create", name="outage")
    training = train(tmp_path / "out", recipe, server.uri)
    training.wait_for(
        lambda: [run for run in find_runs(server.uri, "outage") if steps(server.uri, run["info"]["run_id"], LOSS)]
    )
    server.kill()
    training.wait_for(lambda: "metrics wait for the tracking store" in training.said)
    server.start()
    training.finish()
    run = find_runs(server.uri, "outage")[0]
    assert run["info"]["status"] == "FINISHED"
    assert steps(server.uri, run["info"]["run_id"], LOSS) == list(range(1, 6 * epochs + 1))


def test_one_training_writes_to_the_database_itself(cluster: Cluster, tmp_path: Path, train: Start) -> None:
    recipe = write_recipe(tmp_path, name="direct", tracking__experiment="direct")
    uri = cluster.uri(cluster.create_database("direct"))
    said = train(tmp_path / "out", recipe, uri).finish()
    assert "direct version 1, @champion -> version 1" in said
    assert PASSWORD not in said
    for file in (tmp_path / "out").rglob("*.json"):
        assert "s3cret" not in json.dumps(json.loads(file.read_text(encoding="utf-8"))), file
