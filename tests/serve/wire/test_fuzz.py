"""Whatever is sent, the answer is a 2xx, a 4xx, 503 or 504, in the form that OpenAPI says."""

import os
import warnings
from collections import Counter
from collections.abc import Iterator

import httpx
import hypothesis
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own dependencies
    import schemathesis
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_headers_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

from tests.serve.wire.conftest import Wire

pytestmark = pytest.mark.slow

CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
KNOWN = {"name": "tiny", "version": "local"}
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "10"))
FEW = hypothesis.settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
MANY = hypothesis.settings(FEW, max_examples=15 * EXAMPLES)
KINDS = ["application/json", "image/png", "application/octet-stream", "multipart/form-data; boundary=x"]


def send_bytes(_case: object, content: object) -> dict[str, object]:
    return {"data": content if isinstance(content, bytes) else str(content).encode()}


@pytest.fixture(scope="module")
def client(wire: Wire) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=wire.url, timeout=30) as client:
        yield client


def test_every_answer_conforms_to_openapi(wire: Wire) -> None:
    schemathesis.serializer("image/*")(send_bytes)
    statuses: Counter[tuple[str, int]] = Counter()
    for found in schemathesis.openapi.from_url(f"{wire.url}/openapi.json").get_all_operations():
        operation = found.ok()

        @FEW
        @given(case=operation.as_strategy())
        def send(case: schemathesis.Case) -> None:
            if case.path_parameters and statuses.total() % 4:  # any other name is a 404
                case.path_parameters.update({name: KNOWN[name] for name in case.path_parameters})
            response = case.call()
            statuses[case.operation.label, response.status_code] += 1
            assert response.status_code < 500 or response.status_code in (503, 504), response.text
            case.validate_response(response, checks=CHECKS)

        send()
    print(sorted(statuses.items()))  # noqa: T201 (what a longer run by hand wants to see)
    assert len({label for label, _ in statuses}) >= 15


def check(response: httpx.Response) -> None:
    assert 400 <= response.status_code < 500, response.text
    assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", ["/invocations", "/v2/models/tiny/infer"])
@MANY
@given(body=st.binary(max_size=400))
def test_any_bytes_are_a_4xx(client: httpx.Client, path: str, kind: str, body: bytes) -> None:
    check(client.post(path, content=body, headers={"content-type": kind}))
