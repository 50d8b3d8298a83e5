"""The endpoint, asked wrongly: every mistake has its status and code, and one line that gives nothing away."""

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from serve.app import create_app
from serve.predictor import Predictor
from serve.settings import Settings

JSON = {"content-type": "application/json"}


def assert_error(response: Any, status: int, code: str) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    (error,) = response.json().values()
    assert list(response.json()) == ["error"]
    assert list(error) == ["code", "message"]
    assert error["code"] == code
    assert "\n" not in error["message"]
    assert "Traceback" not in response.text
    assert str(Path.cwd()) not in response.text
    return error["message"]


BAD_JSON = [
    (b"", "not JSON"),
    (b"{", "not JSON"),
    (b"\xff\xfe{}", "not UTF-8"),
    ('{"inputs": ["é"]}'.encode("utf-16"), "not UTF-8"),
    (b"[]", "body: wanted a JSON object with one of dataframe_split"),
    (b"3", "body: "),
    (b"null", "body: wanted a JSON object"),
    (b"{}", "exactly one of"),
    (b'{"params": {"top_k": 1}}', "exactly one of"),
    (b'{"inputs": ["a"], "instances": ["a"]}', "exactly one of"),
    (b'{"inputs": ["a"], "inputs": ["b"]}', "same key twice"),
    (b'{"inputs": [NaN]}', "NaN or Infinity"),
    (b'{"inputs": [-Infinity]}', "NaN or Infinity"),
    (b'{"inputs": [' + b"1" * 5000 + b"]}", "cannot|can be read"),
    (b'{"inputs": ' + b"[" * 90_000 + b"]" * 90_000 + b"}", "nested too deeply"),
    (b'\xef\xbb\xbf{"inputs": ["a"]}', "byte order mark"),
    (b'{"inputs": []}', "no images"),
    (b'{"instances": []}', "no images"),
    (b'{"dataframe_records": []}', "no images"),
    (b'{"inputs": "aGk="}', "inputs"),
    (b'{"inputs": {"picture": ["a"]}}', "inputs: wanted the one field 'image'"),
    (b'{"inputs": {"image": ["a"], "x": ["a"]}}', "inputs: wanted the one field 'image'"),
    (b'{"instances": {"image": ["a"]}}', "instances: "),
    (b'{"instances": [{"picture": "a"}]}', "instances: wanted the one field 'image'"),
    (b'{"dataframe_records": {"image": "a"}}', "dataframe_records: "),
    (b'{"dataframe_records": [{"picture": "a"}]}', "dataframe_records: wanted the one field 'image'"),
    (b'{"dataframe_records": ["a"]}', "dataframe_records.0: "),
    (b'{"dataframe_split": {"data": [["a"]]}}', "dataframe_split.columns: Field required"),
    (b'{"dataframe_split": {"columns": ["a"], "data": [["a"]]}}', "dataframe_split.columns: wanted"),
    (b'{"dataframe_split": {"columns": ["image"], "data": [["a", "b"]]}}', "dataframe_split.data: every row"),
    (b'{"dataframe_split": {"columns": ["image"], "data": ["a"]}}', "dataframe_split.data.0: "),
    (b'{"inputs": ["a"], "params": {"top_k": 0}}', "params.top_k: .*greater than or equal to 1"),
    (b'{"inputs": ["a"], "params": {"top_k": "2"}}', "params.top_k: "),
    (b'{"inputs": ["a"], "params": {"topk": 2}}', "params: unknown field"),
    (b'{"inputs": ["a"], "SECRET": 2}', "body: unknown field"),
    (b'{"inputs": ["a"], "SECRET\\ud800": 2}', "body: .*unicode"),
]


@pytest.mark.parametrize(("body", "message"), BAD_JSON)
def test_json_of_the_wrong_form_is_400(client: TestClient, body: bytes, message: str) -> None:
    text = assert_error(client.post("/invocations", content=body, headers=JSON), 400, "malformed")
    assert re.search(message, text), text
    assert "SECRET" not in text


BAD_IMAGES = [
    ("", r"empty"),
    ("aGVsbG8=", "not an image in one of"),
    ("SECRET!", "not valid base64"),
    ("data:image/png;base64,aGk=", "not valid base64"),
    ("\ud800", "not valid base64"),
    ("日本", "not valid base64"),
    (None, "got NoneType"),
    (3, "got int"),
    (True, "got bool"),
]


@pytest.mark.parametrize(("cell", "message"), BAD_IMAGES)
def test_a_cell_that_is_no_image_is_422(client: TestClient, cell: object, message: str) -> None:
    for body in ({"instances": [cell]}, {"inputs": {"image": [cell]}}, {"dataframe_records": [{"image": cell}]}):
        response = client.post("/invocations", content=json.dumps(body), headers=JSON)
        text = assert_error(response, 422, "bad_image")
        assert message in text
        assert "SECRET" not in text


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (np.zeros((1, 3, 16, 16)).tolist(), r"shape (1, 3, 16, 16), wanted (B, 3, 32, 32)"),
        (np.zeros((3, 32, 32)).tolist(), "wanted (B, 3, 32, 32)"),
        ([[1.0, 2.0], [1.0]], "ragged"),
        ([[1.0, "2"]], "something else than numbers"),
        ([["1.5"]], "something else than numbers"),
        ([[True]], "something else than numbers"),
        ([[None]], "something else than numbers"),
        (np.full((1, 3, 32, 32), 1e300).tolist(), "beyond float32"),
        ([[[1.0, True]]], "something else than numbers"),
        ([[]], "wanted (B, 3, 32, 32)"),
    ],
)
def test_numbers_that_are_no_input_are_422(client: TestClient, tensor: object, message: str) -> None:
    text = assert_error(client.post("/invocations", json={"inputs": tensor}), 422, "bad_tensor")
    assert message in text


def test_a_tensor_among_images_is_422(client: TestClient, texts: list[str]) -> None:
    response = client.post("/invocations", json={"instances": [texts[0], [[1.0]]]})
    assert "image 1: an image is bytes or base64 text, got list" in assert_error(response, 422, "bad_image")


def test_the_bad_image_among_several_is_named(client: TestClient, texts: list[str]) -> None:
    response = client.post("/invocations", json={"instances": [texts[0], texts[1], "aGVsbG8="]})
    assert assert_error(response, 422, "bad_image").startswith("image 2: not an image")


def test_a_body_over_the_limit_is_413_with_and_without_its_length(client: TestClient) -> None:
    def chunks(count: int) -> Iterator[bytes]:
        for _ in range(count):
            yield bytes(50_000)
        if count > 4:
            yield b"x"

    headers = {"content-type": "image/png"}
    assert_error(client.post("/invocations", content=bytes(200_001), headers=headers), 413, "too_large")
    assert_error(client.post("/invocations", content=chunks(5), headers=headers), 413, "too_large")
    assert_error(client.post("/invocations", content=chunks(4), headers=headers), 422, "bad_image")
    headers["content-length"] = "9" * 30
    assert_error(client.post("/invocations", content=b"", headers=headers), 413, "too_large")


def test_too_many_images_are_413(client: TestClient, texts: list[str], images: list[bytes]) -> None:
    response = client.post("/invocations", json={"instances": texts[:1] * 5})
    assert "5 images, more than 4" in assert_error(response, 413, "too_large")
    files = [("f", ("a.png", images[0]))] * 5
    assert "more than 4 files" in assert_error(client.post("/invocations", files=files), 413, "too_large")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("text/csv", "not read here"),
        ("application/xml; x=SECRET", "not read here"),
        ("", "no content type"),
        ("application/json; charset=latin-1", "UTF-8 only"),
    ],
)
def test_other_content_types_are_415(client: TestClient, kind: str, message: str) -> None:
    response = client.post("/invocations", content=b"{}", headers={"content-type": kind})
    text = assert_error(response, 415, "unsupported_media_type")
    assert message in text
    assert "SECRET" not in text


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        ("multipart/form-data", b"", "not multipart"),
        ("multipart/form-data; boundary=x", b"nonsense", "not multipart|no images"),
        ("multipart/form-data; boundary=x", b"", "ends before its last boundary"),
        ("multipart/form-data; boundary=x", b"--x--\r\n", "no images"),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\nContent-Disposition: form-data; name="image"\r\n\r\nabc\r\n--x--\r\n',
            "field that is no file",
        ),
        ("multipart/form-data; boundary=x", b"--x\r\nA: b\r\n\r\nabc\r\n--x--\r\n", "without Content-Disposition"),
    ],
)
def test_broken_forms_are_400(client: TestClient, kind: str, body: bytes, message: str) -> None:
    text = assert_error(client.post("/invocations", content=body, headers={"content-type": kind}), 400, "malformed")
    assert re.search(message, text), text


def test_unknown_paths_and_methods_answer_in_the_same_form(client: TestClient) -> None:
    assert_error(client.get("/SECRET"), 404, "not_found")
    response = client.get("/invocations")
    assert_error(response, 405, "method_not_allowed")
    assert response.headers["allow"] == "POST"


def test_our_own_fault_is_500_in_the_same_form(
    settings: Settings, predictor: Predictor, images: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("SECRET")  # the type of a user's mistake, from the wrong place

    monkeypatch.setattr(predictor, "compute", fail)
    with TestClient(create_app(settings, predictor), raise_server_exceptions=False) as client:
        response = client.post("/invocations", content=images[0], headers={"content-type": "image/png"})
    assert "SECRET" not in assert_error(response, 500, "internal_server_error")


ROWS = [
    {"instances": [""] * 100_000},
    {"instances": [[0.5]] * 100_000},
    {"inputs": {"image": [""] * 100_000}},
    {"dataframe_records": [{"image": ""}] * 100_000},
    {"dataframe_split": {"columns": ["image"], "data": [[""]] * 100_000}},
    {"dataframe_split": {"columns": ["image"], "data": [[0]] * 100_000}},
]


@pytest.mark.parametrize("body", ROWS, ids=lambda body: str(body)[:40])
def test_a_hundred_thousand_rows_are_413(predictor: Predictor, body: object) -> None:
    with TestClient(create_app(Settings(), predictor), raise_server_exceptions=False) as client:
        assert_error(client.post("/invocations", json=body), 413, "too_large")


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "identity, gzip", "SECRET"])
def test_a_compressed_body_is_415(client: TestClient, encoding: str) -> None:
    body = gzip.compress(bytes(10_000_000))
    headers = {"content-type": "image/png", "content-encoding": encoding}
    text = assert_error(client.post("/invocations", content=body, headers=headers), 415, "unsupported_media_type")
    assert "content encoding" in text
    assert "SECRET" not in text


def test_the_encoding_identity_is_read(client: TestClient, images: list[bytes]) -> None:
    headers = {"content-type": "image/png", "content-encoding": "Identity"}
    assert client.post("/invocations", content=images[0], headers=headers).status_code == 200


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "", "1e3", "9" * 20, "SECRET"])
def test_a_timeout_that_is_none_is_400(client: TestClient, images: list[bytes], value: str) -> None:
    headers = {"content-type": "image/png", "x-request-timeout-ms": value}
    text = assert_error(client.post("/invocations", content=images[0], headers=headers), 400, "malformed")
    assert "x-request-timeout-ms" in text
    assert "SECRET" not in text


def test_numbers_too_large_for_the_model_are_the_clients(client: TestClient, images: list[bytes]) -> None:
    huge = np.full((1, 3, 32, 32), 3.4e38).tolist()
    message = assert_error(client.post("/invocations", json={"inputs": huge}), 422, "bad_tensor")
    assert message == "the tensor's numbers are too large for the model: no finite answer"
    body = {"inputs": [{"name": "image", "shape": [1, 3, 32, 32], "datatype": "FP32", "data": huge}]}
    answer = client.post("/v2/models/%E6%95%B0%E5%AD%97%20model/infer", json=body)
    assert (answer.status_code, answer.json()) == (422, {"error": message})
    assert client.post("/invocations", content=images[0], headers={"content-type": "image/png"}).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/models/other/invocations",
        "/models/%2e%2e/invocations",
        "/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd/invocations",
        "/models/..%5c..%5cx/invocations",
        "/models/%00/invocations",
        "/models/tiny%00/invocations",
        "/models/%ff%fe/invocations",
        "/models/%F0%9F%92%A9/invocations",
        "/models//invocations",
        "/models/" + "x" * 5000 + "/invocations",
        "/models/{name}/invocations",
        "/models/%25s/invocations",
        "/models/%7B0%7D/invocations",
        "/models/x/invocations/",
        "/invocations/",
        "//invocations",
        "/../invocations/..",
    ],
)
def test_path_tricks_are_404(client: TestClient, images: list[bytes], path: str) -> None:
    response = client.post(path, content=images[0], headers={"content-type": "image/png"})
    assert response.status_code == 404, response.text
    assert response.json()["error"]["code"] in ("unknown_model", "not_found")
    assert "passwd" not in response.text
