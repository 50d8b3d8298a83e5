"""The same requests against `mlflow models serve` and ours, on the same registered version."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from serve.app import create_app
from serve.models.locate import locate_model
from serve.predictor import Predictor
from serve.settings import Settings
from tests.serve.wire.conftest import wait_until_ready

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def theirs(store: str, registered: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """MLflow's own server."""
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"MLFLOW_TRACKING_URI": store, "PATH": path, "OMP_NUM_THREADS": "1"}
    command = ["mlflow", "models", "serve", "-m", registered, "--env-manager", "local", "--port", str(port)]
    log = folder / "server.log"
    with log.open("w") as file:
        server = subprocess.Popen(
            command, cwd=folder, env=env, stdout=file, stderr=file, start_new_session=True
        )  # its workers are in its group
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(f"{url}/ping", server, log)
        with httpx.Client(base_url=url, timeout=60) as client:
            yield client
    finally:
        os.killpg(server.pid, 9)
        server.wait()


@pytest.fixture(scope="module")
def ours(registered: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """Our endpoint around the same version."""
    located = locate_model(registered, tmp_path_factory.mktemp("ours"))
    predictor = Predictor.from_bundle(located.bundle, name=located.name, version=located.version)
    with TestClient(create_app(Settings(), predictor)) as client:
        yield client


def bodies(texts: list[str]) -> dict[str, dict[str, Any]]:
    rows = [[text] for text in texts]
    return {
        "dataframe_split": {"dataframe_split": {"columns": ["image"], "data": rows}},
        "dataframe_split with index": {"dataframe_split": {"columns": ["image"], "index": [4, 5, 6], "data": rows}},
        "dataframe_records": {"dataframe_records": [{"image": text} for text in texts]},
        "inputs": {"inputs": {"image": texts}},
        "instances": {"instances": [{"image": text} for text in texts]},
    }


@pytest.mark.parametrize("params", [{}, {"params": {"top_k": 1}}, {"params": {"top_k": 99}}], ids=str)
@pytest.mark.parametrize("form", bodies([]))
def test_every_form_gives_equal_numbers_to_the_last_bit(
    theirs: httpx.Client, ours: TestClient, texts: list[str], form: str, params: dict[str, Any]
) -> None:
    body = bodies(texts)[form] | params  # one forward pass of three images in both
    answers = [client.post("/invocations", json=body) for client in (theirs, ours)]
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    assert answers[0].json() == answers[1].json()
    assert len(answers[1].json()["predictions"]) == 3


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"inputs": {"image": ["aGk="]}, "instances": [{"image": "aGk="}]},
        {"dataframe_split": {"columns": ["picture"], "data": [["aGk="]]}},
        {"dataframe_records": [{"image": "!"}]},
        {"instances": [{"image": "aGk="}]},
    ],
)
def test_what_they_refuse_we_refuse(theirs: httpx.Client, ours: TestClient, body: dict[str, Any]) -> None:
    answers = [client.post("/invocations", json=body) for client in (theirs, ours)]
    assert all(400 <= answer.status_code < 500 for answer in answers), answers[0].text
    assert "Traceback" not in answers[1].text
