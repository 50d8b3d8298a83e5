import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from serve.app import create_app
from serve.predictor import Predictor
from serve.settings import Settings

PNG = {"content-type": "image/png"}


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("path", ["/ping", "/health", "/ready"])
def test_a_warm_server_lives_and_is_ready(client: TestClient, method: str, path: str) -> None:
    response = client.request(method, path)
    assert response.status_code == 200
    assert response.headers["x-request-id"]
    if path == "/ready":
        assert response.headers["x-model-version"] == "7"


def test_readiness_ends_with_draining_and_liveness_does_not(settings: Settings, predictor: Predictor) -> None:
    app = create_app(settings, predictor)
    with TestClient(app) as client:
        app.state.draining.began = True
        response = client.get("/ready")
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json()["error"] == {"code": "not_ready", "message": "the server is going down"}
        assert client.get("/v2/health/ready").status_code == 503
        assert [client.get(path).status_code for path in ("/health", "/ping", "/v2/health/live")] == [200] * 3


@pytest.fixture
def release(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An engine that hangs until this is set."""
    release = threading.Event()

    def hang(images: NDArray[np.float32]) -> NDArray[np.float32]:
        release.wait(60)
        return np.full((len(images), 3), 1 / 3, np.float32)

    monkeypatch.setattr(predictor.engine, "run", hang)
    yield release
    release.set()


def test_an_engine_that_hangs_fails_liveness_until_it_gets_on(
    predictor: Predictor, images: list[bytes], release: threading.Event
) -> None:
    settings = Settings(hung_after_s=0.05)
    with TestClient(create_app(settings, predictor)) as client:
        asking = threading.Thread(
            target=client.post, args=("/invocations",), kwargs={"content": images[0], "headers": PNG}
        )
        asking.start()
        statuses = dict.fromkeys(("/health", "/ping", "/ready", "/v2/health/live", "/v2/health/ready"), 200)
        end = time.monotonic() + 20
        while 200 in statuses.values() and time.monotonic() < end:
            statuses = {path: client.get(path).status_code for path in statuses}
        assert set(statuses.values()) == {503}
        release.set()
        asking.join()
        assert client.get("/health").status_code == 200


def test_the_version_says_what_is_served(client: TestClient) -> None:
    answer = client.get("/version").json()
    assert answer["model"] == answer["models"][0]
    assert (answer["model"]["name"], answer["model"]["version"]) == ("数字 model", "7")
    engine = answer["model"]["engine"]
    assert (engine["name"], engine["precision"]) == ("eager", "fp32")
    assert 0 <= engine["golden_difference"] < 1e-5
    assert client.get("/version").headers["x-model-version"] == "7"


def test_metrics_count_what_was_asked(client: TestClient, images: list[bytes]) -> None:
    for _ in range(3):
        assert client.post("/invocations", content=images[0], headers=PNG).status_code == 200
    client.post("/invocations", content=b"no image", headers=PNG)
    client.post("/invocations", content=b"{", headers={"content-type": "application/json"})
    client.post("/models/unknown/invocations", content=images[0], headers=PNG)
    client.get("/nowhere")
    response = client.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    requests = {key[1:]: value for key, value in values.items() if key[0] == "serve_requests_total"}
    model = "数字 model"
    assert requests == {
        (model, "/invocations", "200"): 3,
        (model, "/invocations", "422"): 1,
        ("none", "/invocations", "400"): 1,
        ("none", "/models/{name}/invocations", "404"): 1,
        ("none", "other", "404"): 1,
    }
    assert values["serve_request_duration_seconds_count", "/invocations"] == 5
    assert values["serve_batch_images_count",] == 3
    assert values["serve_batch_images_sum",] == 3
    assert values["serve_stage_duration_seconds_count", "engine"] == 3
    assert values["serve_queue_images", model] == 0
    assert values["serve_model_info", "eager", model, "7"] == 1
