import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send

from serve.operations.access_log import AccessLog
from serve.operations.current import CURRENT, note_model
from serve.operations.metrics import Metrics

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def client(metrics: Metrics) -> Iterator[TestClient]:
    app = FastAPI()

    @app.post("/models/{name}/invocations")
    async def invoke(request: Request, name: str) -> Response:
        note_model("digits", "7", 2)
        logging.getLogger("serve.inside").warning("from within")
        return Response(await request.body(), headers={"x-name": name})

    @app.get("/ping")
    async def ping() -> Response:
        return Response("ok")

    @app.get("/fail")
    async def fail() -> Response:
        raise ZeroDivisionError("SECRET")

    app.add_middleware(AccessLog, metrics)
    with TestClient(app) as client:  # raises whatever leaves the application: nothing may
        yield client


def access_fields(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    (record,) = [record for record in caplog.records if record.name == "serve.access"]
    fields: dict[str, Any] = vars(record)["fields"]
    return fields


def count(metrics: Metrics, route: str, model: str, status: str) -> float | None:
    labels = {"route": route, "model": model, "status": status}
    return metrics.registry.get_sample_value("serve_requests_total", labels)


def test_a_request_is_logged_once_with_all_that_is_known(
    client: TestClient, metrics: Metrics, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    headers = {"x-request-id": "mine", "traceparent": f"00-{TRACE}-{SPAN}-01"}
    response = client.post("/models/SECRET/invocations", content=b"abc", headers=headers)
    assert response.headers["x-request-id"] == "mine"
    fields = access_fields(caplog)
    assert fields.pop("ms") > 0
    assert fields == {
        "method": "POST",
        "route": "/models/{name}/invocations",
        "status": 200,
        "bytes_in": 3,
        "bytes_out": 3,
        "client": "testclient",
        "model": "digits",
        "version": "7",
        "images": 2,
    }
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("serve")]
    assert ours == ["from within", "POST /models/{name}/invocations 200"]
    assert count(metrics, "/models/{name}/invocations", "digits", "200") == 1
    assert metrics.registry.get_sample_value("serve_requests_in_flight") == 0
    route = {"route": "/models/{name}/invocations"}
    assert metrics.registry.get_sample_value("serve_request_duration_seconds_count", route) == 1


def test_every_record_of_a_request_carries_its_ids(client: TestClient) -> None:
    seen = {}

    class Spy(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            current = CURRENT.get()
            seen[record.name] = current and (current.request_id, current.trace_id, current.span_id)

    spy = Spy()
    logging.getLogger("serve").addHandler(spy)
    level = logging.getLogger("serve").level
    logging.getLogger("serve").setLevel(logging.INFO)
    try:
        headers = {"x-request-id": "mine", "traceparent": f"00-{TRACE}-{SPAN}-01"}
        client.post("/models/a/invocations", headers=headers)
    finally:
        logging.getLogger("serve").removeHandler(spy)
        logging.getLogger("serve").setLevel(level)
    assert seen == {"serve.inside": ("mine", TRACE, SPAN), "serve.access": ("mine", TRACE, SPAN)}
    assert CURRENT.get() is None


def test_a_path_that_is_no_route_is_other_in_log_and_metrics(
    client: TestClient, metrics: Metrics, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for i in range(50):
        client.get(f"/SECRET-{i}")
    assert "SECRET" not in "".join(record.getMessage() for record in caplog.records if record.name == "serve.access")
    assert count(metrics, "other", "none", "404") == 50
    routes = {s.labels.get("route") for family in metrics.registry.collect() for s in family.samples}
    assert routes == {"other", None}


def test_a_probe_that_succeeds_is_quiet(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    client.get("/ping")
    assert [record for record in caplog.records if record.name == "serve.access"] == []
    caplog.set_level(logging.DEBUG)
    client.get("/ping")
    assert access_fields(caplog)["route"] == "/ping"


def test_our_own_fault_is_told_once_to_the_log_and_never_to_the_client(
    client: TestClient, metrics: Metrics, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    response = client.get("/fail", headers={"x-request-id": "mine"})
    assert response.status_code == 500
    assert response.headers["x-request-id"] == "mine"
    assert response.json()["error"]["code"] == "internal_server_error"
    assert "SECRET" not in response.text
    traces = [record for record in caplog.records if record.exc_info]
    assert [record.getMessage() for record in traces] == ["a request failed by our own fault: ZeroDivisionError"]
    assert count(metrics, "/fail", "none", "500") == 1


async def talk(app: Any, metrics: Metrics, received: list[Message]) -> list[Message]:
    """Run one request through the layer; where `received` ends, the client is silent."""
    sent: list[Message] = []

    async def receive() -> Message:
        if received:
            return received.pop(0)
        await asyncio.sleep(3600)
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/x", "headers": [], "client": None, "state": {}}
    await AccessLog(app, metrics)(scope, receive, send)
    assert CURRENT.get() is None  # the connection's next request is another
    return sent


async def leave_early(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    await Response("late", 400)(scope, receive, send)


async def break_off(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"half", "more_body": True})
    raise ZeroDivisionError


async def wait_long(_scope: Scope, receive: Receive, _send: Send) -> None:
    await receive()


def test_a_client_that_left_is_499_whatever_was_answered(metrics: Metrics) -> None:
    body = {"type": "http.request", "body": b"ab", "more_body": True}
    asyncio.run(talk(leave_early, metrics, [body, {"type": "http.disconnect"}]))
    assert count(metrics, "other", "none", "499") == 1


def test_an_answer_that_broke_off_is_500_and_not_begun_anew(metrics: Metrics) -> None:
    sent = asyncio.run(talk(break_off, metrics, []))
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert count(metrics, "other", "none", "500") == 1


def test_a_request_that_is_cut_is_told_so(metrics: Metrics) -> None:
    async def cut() -> list[Message]:
        task = asyncio.create_task(talk(wait_long, metrics, []))
        await asyncio.sleep(0)
        task.cancel()
        return await task

    sent = asyncio.run(cut())
    assert sent[0]["status"] == 503
    assert (b"retry-after", b"1") in sent[0]["headers"]
    assert count(metrics, "other", "none", "503") == 1
    assert metrics.registry.get_sample_value("serve_requests_in_flight") == 0


def test_no_line_is_logged_where_none_is_wanted(metrics: Metrics, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    assert TestClient(AccessLog(Response("ok"), metrics, log=False)).get("/x").headers["x-request-id"]
    assert [record for record in caplog.records if record.name == "serve.access"] == []
    assert count(metrics, "other", "none", "200") == 1
