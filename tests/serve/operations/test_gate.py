from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from serve.operations.access_log import AccessLog
from serve.operations.gate import PROBES, Gate
from serve.operations.keys import KeyRing
from serve.operations.metrics import Metrics
from serve.operations.rates import RateLimiter

KEY, OTHER = "key-of-alice-0123456789", "key-of-bob-0123456789"
Build = Callable[..., TestClient]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Build clients of a gate: `build(rate="2/minute", client="10.0.0.1")`."""
    (tmp_path / "keys").write_text(f"alice:{KEY}\nbob:{OTHER}\n")

    def build_client(*, keys: bool = True, rate: str = "", client: str = "10.0.0.1", proxies: str = "") -> TestClient:
        ring = KeyRing(tmp_path / "keys") if keys else None
        rates = RateLimiter(rate, clock=lambda: 0.0) if rate else None
        app = AccessLog(Gate(PlainTextResponse("in"), ring, rates, lambda _: None), Metrics())
        outer = ProxyHeadersMiddleware(app, proxies) if proxies else app  # type: ignore[arg-type]
        return TestClient(outer, client=(client, 5))  # type: ignore[arg-type]

    return build_client


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "path",
    [
        "/invocations",
        "/metrics",
        "/version",
        "/openapi.json",
        "/v2/models/x",
        "/v2",
        "/nowhere",
        "/ping/",
        "/PING",
        "/ping/../metrics",
        "//ping",
        "/v2/health/live/x",
        "/health%2F",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "HEAD"])
def test_without_a_key_nothing_but_probes_is_answered(build: Build, path: str, method: str) -> None:
    client = build()
    response = client.request(method, path)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == 'Bearer realm="attention-zoo"'
    assert client.request(method, path, headers=bearer(KEY)).text in ("in", "")
    assert client.request(method, path, headers={"x-api-key": OTHER}).status_code == 200
    refused = client.request(method, path, headers=bearer("SECRET-0123456789"))
    assert refused.status_code == 401
    assert "SECRET" not in refused.text


def test_an_error_is_in_the_form_of_its_protocol(build: Build) -> None:
    client = build()
    assert client.get("/invocations").json()["error"]["code"] == "key_refused"
    assert client.get("/v2/models/x").json()["error"].startswith("an API key is needed")


@pytest.mark.parametrize("path", sorted(PROBES))
def test_probes_need_no_key_and_are_not_counted(build: Build, path: str) -> None:
    client = build(rate="1/day")
    assert [client.get(path).status_code for _ in range(5)] == [200] * 5
    assert client.get("/x", headers=bearer(KEY)).status_code == 200


def test_the_name_of_the_key_is_logged_and_never_the_key(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    client = build()
    client.get("/x", headers=bearer(KEY))
    client.get("/x", headers=bearer("SECRET-0123456789"))
    lines = [vars(record) for record in caplog.records if record.name == "serve.access"]
    assert [line["fields"].get("key") for line in lines] == ["alice", None]
    assert KEY not in str(lines)
    assert "SECRET" not in str(lines)


def test_the_rate_is_of_a_key_or_else_of_an_address(build: Build) -> None:
    client = build(rate="2/minute")
    assert [client.get("/x", headers=bearer(KEY)).status_code for _ in range(3)] == [200, 200, 429]
    assert client.get("/x", headers=bearer(OTHER)).status_code == 200
    response = client.get("/x", headers=bearer(KEY))
    assert response.json()["error"]["code"] == "too_many_requests"
    assert 1 <= int(response.headers["retry-after"]) <= 120
    client = build(keys=False, rate="2/minute")
    assert [client.get("/x").status_code for _ in range(3)] == [200, 200, 429]


def test_keys_cannot_be_guessed_at_any_pace_and_guessing_harms_no_key(build: Build) -> None:
    client = build(rate="2/minute")
    statuses = [client.get("/x", headers=bearer(f"guess-{i:020d}")).status_code for i in range(4)]
    assert statuses == [401, 401, 429, 429]
    assert client.get("/x", headers=bearer(KEY)).status_code == 200


def test_a_forwarded_address_is_believed_of_trusted_proxies_alone(build: Build) -> None:
    def statuses(client: TestClient) -> list[int]:
        return [client.get("/x", headers={"x-forwarded-for": f"1.2.3.{i}"}).status_code for i in range(3)]

    assert statuses(build(keys=False, rate="1/day")) == [200, 429, 429]
    assert statuses(build(keys=False, rate="1/day", proxies="10.0.0.0/8")) == [200, 200, 200]
    assert statuses(build(keys=False, rate="1/day", proxies="10.0.0.0/8", client="11.0.0.1")) == [200, 429, 429]


def test_a_refused_upload_closes_its_connection(build: Build) -> None:
    client = build()
    large, small = bytes(128 * 1024 + 1), bytes(128 * 1024)
    assert client.post("/x", content=large).headers["connection"] == "close"
    assert client.post("/x", content=iter([b"abc"])).headers["connection"] == "close"  # chunked: of any length
    assert "connection" not in client.post("/x", content=small).headers  # skipped, not worth a new connection
    assert "connection" not in client.get("/x").headers
