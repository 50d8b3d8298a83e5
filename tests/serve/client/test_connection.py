import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from serve.client import Backoff, Client, ClientError
from serve.client.connection import check_url
from tests.serve.client.conftest import DRIP, DROP, Planted, busy, prediction

QUICK = Backoff(first_s=0.001)


def predict(planted: Planted, image: bytes = b"elm", **options: object) -> str:
    async def ask() -> str:
        async with Client(planted.url, **{"backoff": QUICK, **options}) as client:
            return (await client.predict(image)).label

    return asyncio.run(ask())


def test_it_sends_the_image_as_it_is_with_key_and_deadline(planted):
    assert predict(planted, b"ash", api_key="k" * 16, timeout_s=2.5, top_k=3) == "ash"
    ((path, headers, body),) = planted.asked
    assert (path, body) == ("/invocations?top_k=3", b"ash")
    assert headers["authorization"] == "Bearer " + "k" * 16
    assert headers["content-type"] == "application/octet-stream"
    assert headers["x-request-timeout-ms"] == "2500"


def test_a_model_is_asked_by_its_name_whatever_is_in_it(planted):
    predict(planted, model="日本 a/../b")
    assert planted.asked[0][0] == "/models/%E6%97%A5%E6%9C%AC%20a%2F..%2Fb/invocations"
    assert "authorization" not in planted.asked[0][1]


@pytest.mark.parametrize("trouble", [busy(503), busy(429), busy(504), DROP], ids=["503", "429", "504", "drop"])
def test_what_another_try_may_mend_is_tried_again_with_the_same_bytes(planted, trouble):
    planted.script = [trouble, trouble]
    assert predict(planted) == "elm"
    assert [body for _, _, body in planted.asked] == [b"elm"] * 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 408, 413, 415, 422, 500, 501, 302])
def test_what_another_try_cannot_mend_is_not_tried_again(planted, status):
    planted.script = [busy(status)]
    with pytest.raises(ClientError, match=f"^answered {status}: planted refusal$") as caught:
        predict(planted)
    assert len(planted.asked) == 1
    assert caught.value.status == status
    assert caught.value.concerns_all == (status in (401, 403, 404, 405))


def test_it_gives_up_after_its_tries_and_says_what_was_answered_last(planted):
    planted.script = [DROP, busy(429), busy(503)]
    with pytest.raises(ClientError, match=r"^answered 503: planted refusal \(3 tries\)$"):
        predict(planted, backoff=Backoff(retries=2, first_s=0.001))
    assert len(planted.asked) == 3


def test_retry_after_is_waited_for(planted, monkeypatch):
    waits = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr("serve.client.connection.asyncio.sleep", sleep)
    planted.script = [busy(503, "7"), busy(503)]
    assert predict(planted, backoff=Backoff(first_s=0.5)) == "elm"
    assert 7 <= waits[0] <= 7.25
    assert 0.5 <= waits[1] <= 1


def test_a_server_that_asks_for_an_hour_is_not_waited_for(planted):
    planted.script = [busy(429, "3600")]
    with pytest.raises(ClientError, match=r"^answered 429: planted refusal$"):
        predict(planted)


def test_an_answer_that_does_not_come_is_a_failure_of_that_try(planted):
    planted.delay_s = 0.5
    with pytest.raises(ClientError, match=r"^no answer within 0\.05 s \(2 tries\)$") as caught:
        predict(planted, timeout_s=0.05, backoff=Backoff(retries=1, first_s=0.001))
    assert not caught.value.concerns_all


def test_an_answer_that_drips_is_late_too(planted):
    planted.script = [DRIP]
    with pytest.raises(ClientError, match=r"^no answer within 0\.1 s$"):
        predict(planted, timeout_s=0.1, backoff=Backoff(retries=0))


def test_one_that_has_answered_before_may_come_back_for_the_others():
    tries = []

    def answer(request: httpx.Request) -> httpx.Response:
        tries.append(request)
        if len(tries) > 1:
            raise httpx.ConnectError("refused")
        return httpx.Response(200, content=prediction("oak")[2])

    async def ask() -> None:
        async with Client(transport=httpx.MockTransport(answer), backoff=Backoff(retries=0)) as client:
            await client.predict(b"")
            await client.predict(b"")

    with pytest.raises(ClientError, match=r"^the connection failed: refused$") as caught:
        asyncio.run(ask())
    assert not caught.value.concerns_all


def test_nobody_there_concerns_all():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(ClientError, match=r"^the connection failed: .* \(6 tries\)$") as caught:
            predict(Planted(url=url))
    assert caught.value.concerns_all


def test_a_drop_concerns_the_one_image(planted):
    planted.script = [DROP] * 6
    with pytest.raises(ClientError, match=r"^the connection failed: .* \(6 tries\)$") as caught:
        predict(planted)
    assert not caught.value.concerns_all


@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", b'{"predictions": []}', b"[" * 100_000, b"\xff"])
def test_an_answer_of_something_else_is_said(planted, body):
    planted.script = [(200, {}, body)]
    with pytest.raises(ClientError, match="something else than one prediction; is this the URL of the endpoint"):
        predict(planted)


@pytest.mark.parametrize("body", [b"<html>", b"[" * 100_000, b'{"error": 1}', b'["error"]', b"\xff"])
def test_a_refusal_of_another_form_is_said_by_its_status(planted, body):
    planted.script = [(413, {}, body)]
    with pytest.raises(ClientError, match=r"^answered 413: (Request Entity|Content) Too Large$"):
        predict(planted)


def test_what_a_server_says_cannot_move_the_terminals_cursor(planted):
    planted.script = [(422, {}, b'{"error": {"message": "\\u001b[2J' + b"x" * 500 + b'"}}')]
    with pytest.raises(ClientError) as caught:
        predict(planted)
    assert str(caught.value).startswith("answered 422: ?[2Jxxx")
    assert len(str(caught.value)) < 330


def test_requests_at_a_time_are_bounded(planted):
    planted.delay_s = 0.02

    async def ask() -> None:
        async with Client(planted.url, concurrency=3) as client:
            answers = await asyncio.gather(*(client.predict(b"%d" % i) for i in range(12)))
        assert [answer.label for answer in answers] == [str(i) for i in range(12)]

    asyncio.run(ask())
    assert planted.most_at_once == 3


def test_another_transport_may_be_given():
    transport = httpx.MockTransport(lambda _request: httpx.Response(200, content=prediction("oak")[2]))
    assert predict(Planted(url="http://no.such.host"), transport=transport) == "oak"


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://host", "http://", "//host", "http://[::1", "http://a\nb"])
def test_what_is_no_url_of_an_endpoint_is_refused(url):
    with pytest.raises(ValueError, match="is no URL"):
        check_url(url)


def test_a_slash_at_the_end_is_no_matter(planted):
    planted.url += "/"
    assert predict(planted) == "elm"
    assert planted.asked[0][0] == "/invocations"


def test_the_client_needs_neither_torch_nor_mlflow_nor_the_server():
    heavy = "{'fastapi', 'mlflow', 'onnxruntime', 'starlette', 'timm', 'torch', 'uvicorn'}"
    code = (
        f"import sys; from serve.client import Client; import serve.client.__main__; print({heavy} & set(sys.modules))"
    )
    root = Path(__file__).parent.parent.parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
