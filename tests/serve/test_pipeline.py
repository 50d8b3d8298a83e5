"""The stages together: deadlines, room in the queue, what is counted, what a fault of ours looks like."""

import base64
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray
from starlette.testclient import TestClient

from serve.app import create_app
from serve.predictor import Predictor
from serve.settings import Settings

PNG = {"content-type": "image/png"}


@pytest.fixture
def gate(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The engine computes nothing before this is set."""
    opened = threading.Event()
    compute = predictor.compute

    def wait(images: NDArray[np.float32]) -> NDArray[np.float32]:
        opened.wait(20)
        return compute(images)

    monkeypatch.setattr(predictor, "compute", wait)
    yield opened
    opened.set()


def start(predictor: Predictor, **settings: object) -> TestClient:
    return TestClient(create_app(Settings(**settings), predictor), raise_server_exceptions=False)


@pytest.mark.parametrize("asked", [{}, {"x-request-timeout-ms": "60000"}])
def test_no_answer_in_time_is_504(
    gate: threading.Event, predictor: Predictor, images: list[bytes], asked: dict[str, str]
) -> None:
    with start(predictor, request_timeout_s=0.1) as client:
        answer = client.post("/invocations", content=images[0], headers=PNG | asked)
        gate.set()
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "deadline"
        assert client.post("/invocations", content=images[0], headers=PNG).status_code == 200


def test_a_client_may_ask_for_less_time(gate: threading.Event, predictor: Predictor, images: list[bytes]) -> None:
    with start(predictor, request_timeout_s=20) as client:
        started = time.monotonic()
        answer = client.post("/invocations", content=images[0], headers=PNG | {"x-request-timeout-ms": "50"})
        gate.set()
        assert answer.status_code == 504
        assert time.monotonic() - started < 15


def test_a_full_queue_is_503_at_once_and_has_room_again(
    gate: threading.Event, predictor: Predictor, images: list[bytes], texts: list[str]
) -> None:
    with start(predictor, max_queue=2) as client, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.post, "/invocations", json={"instances": texts[:2]})
        while not client.app.state.metrics.registry.get_sample_value("serve_queue_images", {"model": predictor.name}):
            time.sleep(0.01)
        answer = client.post("/invocations", content=images[0], headers=PNG)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "queue_full"
        assert int(answer.headers["retry-after"]) >= 1
        gate.set()
        assert waiting.result().status_code == 200
        assert client.post("/invocations", content=images[0], headers=PNG).status_code == 200


def test_a_bad_image_gives_its_place_back(predictor: Predictor, images: list[bytes]) -> None:
    with start(predictor, max_queue=1) as client:
        for _ in range(5):
            assert client.post("/invocations", content=b"hello", headers=PNG).status_code == 422
        assert client.post("/invocations", content=images[0], headers=PNG).status_code == 200


def test_a_large_body_is_parsed_like_a_small_one(predictor: Predictor, images: list[bytes]) -> None:
    padded = base64.b64encode(images[0] + bytes(200_000)).decode()  # what follows a PNG's end is not read
    with start(predictor) as client:
        answers = [
            client.post("/invocations", content=json.dumps({"instances": [text]}), headers={"content-type": kind})
            for text in (padded, base64.b64encode(images[0]).decode())
            for kind in ("application/json",)
        ]
        bad = client.post("/invocations", json={"instances": [padded + "!"]})
    assert answers[0].json() == answers[1].json()
    assert bad.status_code == 422


def test_every_stage_is_timed(predictor: Predictor, images: list[bytes]) -> None:
    with start(predictor) as client:
        client.post("/invocations", content=images[0], headers=PNG)
        registry = client.app.state.metrics.registry
        for stage in ("read", "decode", "queue", "engine"):
            assert registry.get_sample_value("serve_stage_duration_seconds_count", {"stage": stage}) == 1


def test_a_timeout_of_something_else_is_our_fault(
    predictor: Predictor, images: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise TimeoutError("SECRET")

    monkeypatch.setattr("serve.pipeline.to_images", fail)
    with start(predictor) as client:
        answer = client.post("/invocations", content=images[0], headers=PNG)
    assert answer.status_code == 500
    assert "SECRET" not in answer.text
