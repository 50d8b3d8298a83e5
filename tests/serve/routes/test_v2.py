"""Open Inference v2, as its specification and Triton's binary tensor data say."""

import json
import struct
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from starlette.testclient import TestClient

from serve.predictor import Predictor
from serve.protocol import inference_v2
from zoo.preprocess import preprocess

MODEL = "/v2/models/" + quote("数字 model")
HEADER = "inference-header-content-length"


@pytest.fixture
def tensor(predictor: Predictor, images: list[bytes]) -> np.ndarray:
    return np.stack([preprocess(image, predictor.card.preprocessing) for image in images])


@pytest.fixture
def expected(predictor: Predictor, tensor: np.ndarray) -> tuple[np.ndarray, list[str]]:
    probabilities = predictor.predict(tensor)
    return probabilities, [predictor.card.class_names[k] for k in probabilities.argmax(1)]


def files(texts: list[str], **more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "image", "shape": [len(texts)], "datatype": "BYTES", "data": texts, **more}]}


def pack(*elements: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


def ask_binary(client: TestClient, head: dict[str, Any], binary: bytes, length: int | None = None) -> Any:
    text = json.dumps(head).encode()
    headers = {HEADER: str(len(text) if length is None else length), "content-type": "application/octet-stream"}
    return client.post(f"{MODEL}/infer", content=text + binary, headers=headers)


def check(answer: Any, expected: tuple[np.ndarray, list[str]]) -> None:
    assert answer.status_code == 200, answer.text
    probabilities, label = answer.json()["outputs"]
    assert (probabilities["name"], probabilities["datatype"], probabilities["shape"]) == (
        "probabilities",
        "FP32",
        [3, 3],
    )
    assert (label["name"], label["datatype"], label["shape"]) == ("label", "BYTES", [3])
    assert np.array_equal(np.float32(probabilities["data"]).reshape(3, 3), expected[0])
    assert label["data"] == expected[1]


def test_metadata_of_server_and_model(client: TestClient) -> None:
    for path in ("/v2", "/v2/"):
        server = client.get(path).json()
        assert (server["name"], server["extensions"]) == ("attention-zoo", ["binary_tensor_data"])
    for path in (MODEL, f"{MODEL}/versions/7"):
        model = client.get(path).json()
        assert (model["name"], model["versions"], model["platform"]) == ("数字 model", ["7"], "pytorch_eager")
        either = {"or": "FP32 [-1,3,32,32]"}
        assert model["inputs"] == [{"name": "image", "datatype": "BYTES", "shape": [-1], "parameters": either}]
        assert [(o["name"], o["datatype"], o["shape"]) for o in model["outputs"]] == [
            ("probabilities", "FP32", [-1, 3]),
            ("label", "BYTES", [-1]),
        ]


def test_probes(client: TestClient) -> None:
    assert client.get("/v2/health/live").json() == {"live": True}
    assert client.get("/v2/health/ready").json() == {"live": True, "ready": True}
    for path in (f"{MODEL}/ready", f"{MODEL}/versions/7/ready"):
        assert client.get(path).json() == {"name": "数字 model", "ready": True}


@pytest.mark.parametrize("path", [f"{MODEL}/infer", f"{MODEL}/versions/7/infer"])
def test_files_in_json(client: TestClient, texts: list[str], expected: tuple[np.ndarray, list[str]], path: str) -> None:
    answer = client.post(path, json=files(texts))
    check(answer, expected)
    assert (answer.json()["model_name"], answer.json()["model_version"]) == ("数字 model", "7")
    assert "id" not in answer.json()
    assert answer.headers["x-model-version"] == "7"


def test_files_of_shape_b_1(client: TestClient, texts: list[str], expected: tuple[np.ndarray, list[str]]) -> None:
    for data in (texts, [[text] for text in texts]):
        check(client.post(f"{MODEL}/infer", json=files(texts, shape=[3, 1], data=data)), expected)


def test_a_tensor_in_json(client: TestClient, tensor: np.ndarray, expected: tuple[np.ndarray, list[str]]) -> None:
    for data in (tensor.tolist(), tensor.ravel().tolist()):
        body = {"inputs": [{"name": "image", "shape": [3, 3, 32, 32], "datatype": "FP32", "data": data}]}
        check(client.post(f"{MODEL}/infer", json=body), expected)


def test_binary_both_ways(
    client: TestClient, images: list[bytes], tensor: np.ndarray, expected: tuple[np.ndarray, list[str]]
) -> None:
    for kind, shape, binary in (
        ("BYTES", [3], pack(*images)),
        ("FP32", [3, 3, 32, 32], tensor.astype("<f4").tobytes()),
    ):
        parameters = {"binary_data_size": len(binary)}
        head = {"inputs": [{"name": "image", "shape": shape, "datatype": kind, "parameters": parameters}]}
        check(ask_binary(client, head, binary), expected)
        answer = ask_binary(client, {**head, "parameters": {"binary_data_output": True}}, binary)
        assert answer.headers["content-type"] == "application/octet-stream"
        length = int(answer.headers[HEADER])
        reply, rest = json.loads(answer.content[:length]), answer.content[length:]
        assert [o["parameters"]["binary_data_size"] for o in reply["outputs"]] == [36, len(rest) - 36]
        assert np.array_equal(np.frombuffer(rest[:36], "<f4").reshape(3, 3), expected[0])
        assert rest[36:] == pack(*(label.encode() for label in expected[1]))


def test_only_the_outputs_that_are_wanted_in_their_order(client: TestClient, texts: list[str]) -> None:
    def names(*outputs: dict[str, Any]) -> list[tuple[str, bool]]:
        answer = client.post(f"{MODEL}/infer", json={**files(texts), "outputs": outputs})
        reply = json.loads(answer.content[: int(answer.headers.get(HEADER, len(answer.content)))])
        return [(output["name"], "data" in output) for output in reply["outputs"]]

    assert names({"name": "label"}) == [("label", True)]
    assert names({"name": "label"}, {"name": "probabilities"}) == [("label", True), ("probabilities", True)]
    binary = {"name": "probabilities", "parameters": {"binary_data": True}}
    assert names(binary, {"name": "label"}) == [("probabilities", False), ("label", True)]


def test_the_id_comes_back(client: TestClient, texts: list[str]) -> None:
    for name in ("42", "a1B2-c3_d4", "x" * 128, "urn:uuid:6e8bc430/9c3a=@#+."):
        assert client.post(f"{MODEL}/infer", json={"id": name, **files(texts)}).json()["id"] == name


def test_parameters_that_are_not_known_are_not_used(client: TestClient, texts: list[str]) -> None:
    body = {**files(texts, parameters={"x": 1.5}), "parameters": {"priority": 3, "y": "z", "w": False}}
    assert client.post(f"{MODEL}/infer", json=body).status_code == 200


GOOD = {"name": "image", "shape": [1], "datatype": "BYTES", "data": ["aGk="]}
MISTAKES = [
    ({}, 400, "inputs: Field required"),
    ([], 400, "body: wanted a JSON object with inputs"),
    ({"inputs": []}, 400, "inputs: "),
    ({"inputs": [GOOD, GOOD]}, 400, "inputs: "),
    ({"inputs": [{**GOOD, "name": "SECRET"}]}, 400, "inputs.0.name: Input should be 'image'"),
    ({"inputs": [{**GOOD, "datatype": "INT8"}]}, 400, "inputs.0.datatype: Input should be 'BYTES' or 'FP32'"),
    ({"inputs": [{**GOOD, "shape": [2]}]}, 422, "not the given shape"),
    ({"inputs": [{**GOOD, "shape": [1, 1, 1]}]}, 422, "shape (B) or (B, 1)"),
    ({"inputs": [{**GOOD, "shape": []}]}, 400, "inputs.0.shape"),
    ({"inputs": [{**GOOD, "shape": [-1]}]}, 400, "inputs.0.shape.0"),
    ({"inputs": [{**GOOD, "shape": [1.0]}]}, 400, "inputs.0.shape.0"),
    ({"inputs": [{**GOOD, "shape": [10**30]}]}, 400, "inputs.0.shape.0"),
    ({"inputs": [{**GOOD, "shape": [0], "data": []}]}, 400, "no images"),
    ({"inputs": [{**GOOD, "shape": [2**62]}]}, 413, "more than 4"),
    ({"inputs": [{**GOOD, "shape": [5], "data": ["aGk="] * 5}]}, 413, "5 images, more than 4"),
    ({"inputs": [{**GOOD, "data": ["SECRET!"]}]}, 422, "not valid base64"),
    ({"inputs": [{**GOOD, "data": [3]}]}, 422, "got int"),
    ({"inputs": [{**GOOD, "data": ["aGk="]}]}, 422, "not an image"),
    ({"inputs": [{**GOOD, "data": None}]}, 400, "give either data or parameters.binary_data_size"),
    ({"inputs": [{**GOOD, "parameters": {"binary_data_size": 4}}]}, 400, "give either data or"),
    ({"inputs": [{**GOOD, "parameters": {"x": []}}]}, 400, "inputs.0.parameters"),
    ({"inputs": [{**GOOD, "SECRET": 1}]}, 400, "unknown field"),
    ({"inputs": [GOOD], "SECRET": 1}, 400, "body: unknown field"),
    ({"inputs": [GOOD], "id": "<script>SECRET"}, 400, "id: String should match"),
    ({"inputs": [GOOD], "id": ""}, 400, "id: String should match"),
    ({"inputs": [GOOD], "id": "x" * 129}, 400, "id: String should match"),
    ({"inputs": [GOOD], "id": "SECRET\n"}, 400, "id: String should match"),
    ({"inputs": [GOOD], "id": "\ud800"}, 400, "id: "),
    ({"inputs": [GOOD], "id": 42}, 400, "id: "),
    ({"inputs": [GOOD], "outputs": [{"name": "logits"}]}, 400, "outputs.0.name: Input should be 'probabilities'"),
    ({"inputs": [GOOD], "outputs": [{"name": "label"}] * 2}, 400, "names one twice"),
    ({"inputs": [GOOD], "outputs": [{"name": "label", "parameters": {"classification": 2}}]}, 400, "classification"),
    ({"inputs": [GOOD], "parameters": {"sequence_id": 2}}, 400, "sequence"),
    ({"inputs": [{**GOOD, "parameters": {"shared_memory_region": "a"}}]}, 400, "shared memory"),
    ({"inputs": [GOOD], "parameters": {"binary_data_output": 1}}, 400, "binary_data_output has another type"),
    ({"inputs": [{**GOOD, "datatype": "FP32", "shape": [1, 3], "data": [1, 2]}]}, 422, "not the given shape"),
    ({"inputs": [{**GOOD, "datatype": "FP32", "shape": [1, 2], "data": [[1], [2]]}]}, 422, "not the given shape"),
    ({"inputs": [{**GOOD, "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}, 422, "wanted (B, 3, 32, 32)"),
    ({"inputs": [{**GOOD, "datatype": "FP32", "shape": [1], "data": ["1"]}]}, 422, "something else than numbers"),
    ({"inputs": [{**GOOD, "datatype": "FP32", "shape": [1], "data": [True]}]}, 422, "something else than numbers"),
]


@pytest.mark.parametrize(("body", "status", "message"), MISTAKES)
def test_a_mistake_is_one_text_under_error(client: TestClient, body: object, status: int, message: str) -> None:
    answer = client.post(f"{MODEL}/infer", content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    assert list(answer.json()) == ["error"]
    assert message in answer.json()["error"]
    assert "SECRET" not in answer.text


BINARY = [
    ("BYTES", [1], pack(b"a"), None, 422, "not an image"),
    ("BYTES", [2], pack(b"a"), None, 422, "not the given shape"),
    ("BYTES", [1], pack(b"a") + b"\0", None, 422, "ends within an element"),
    ("BYTES", [1], b"\xff\xff\xff\xff", None, 422, "ends within an element"),
    ("BYTES", [1], b"", None, 422, "not the given shape"),
    ("FP32", [1, 3, 32, 32], bytes(4), None, 422, "not the size of an FP32 tensor"),
    ("FP32", [1, 3, 32, 32], b"\0\0\xc0\x7f" * 3072, None, 422, "NaN"),
    ("FP32", [1, 3, 32, 32], bytes(4 * 3072), 10**6, 400, "at most those of the body"),
    ("FP32", [1, 3, 32, 32], bytes(4 * 3072), 3, 400, "not JSON"),
]


@pytest.mark.parametrize(("kind", "shape", "binary", "length", "status", "message"), BINARY)
def test_binary_data_that_does_not_fit(
    client: TestClient, kind: str, shape: list[int], binary: bytes, length: int | None, status: int, message: str
) -> None:
    parameters = {"binary_data_size": len(binary)}
    head = {"inputs": [{"name": "image", "shape": shape, "datatype": kind, "parameters": parameters}]}
    answer = ask_binary(client, head, binary, length)
    assert answer.status_code == status, answer.text
    assert message in answer.json()["error"]


def test_no_more_elements_are_read_than_the_shape_has(monkeypatch: pytest.MonkeyPatch, client: TestClient) -> None:
    read: list[int] = []
    real = inference_v2._unpack
    monkeypatch.setattr(
        inference_v2, "_unpack", lambda binary, count: [read.append(len(got := real(binary, count))), got][1]
    )
    binary = bytes(4 * 20_000)  # 20,000 empty elements
    head = {"inputs": [{"name": "image", "shape": [1], "datatype": "BYTES"}]}
    head["inputs"][0]["parameters"] = {"binary_data_size": len(binary)}
    answer = ask_binary(client, head, binary)
    assert (answer.status_code, read) == (422, [2])
    assert "not the given shape" in answer.json()["error"]


@pytest.mark.parametrize("size", [0, 3, 5, -5])
def test_the_size_of_binary_data_must_be_what_follows(client: TestClient, size: int) -> None:
    parameters = {"binary_data_size": size}
    head = {"inputs": [{"name": "image", "shape": [1], "datatype": "BYTES", "parameters": parameters}]}
    answer = ask_binary(client, head, b"abcd")
    assert answer.status_code == 400
    assert "not the number of bytes after the JSON" in answer.json()["error"]


@pytest.mark.parametrize("value", ["-1", "", "1.0", "9" * 30, "SECRET"])
def test_a_header_length_that_is_none_is_400(client: TestClient, texts: list[str], value: str) -> None:
    answer = client.post(f"{MODEL}/infer", json=files(texts), headers={HEADER: value})
    assert answer.status_code == 400
    assert HEADER in answer.json()["error"]
    assert "SECRET" not in answer.text


@pytest.mark.parametrize(
    "path",
    [
        "/v2/models/other",
        "/v2/models/other/ready",
        f"{MODEL}/versions/6",
        f"{MODEL}/versions/6/ready",
        f"{MODEL}/versions/",
        f"{MODEL}/versions/7%00",
        "/v2/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "/v2/models/..%2f..",
        "/v2/models/%00",
        "/v2/models/%ff",
        "/v2/models/",
        "/v2/SECRET",
    ],
)
def test_what_is_not_served_is_404_in_the_protocols_form(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert list(answer.json()) == ["error"]
    assert isinstance(answer.json()["error"], str)
    assert "SECRET" not in answer.text


def test_other_content_types_and_methods(client: TestClient, texts: list[str]) -> None:
    body = json.dumps(files(texts))
    for kind, status in (("text/csv", 415), ("multipart/form-data; boundary=x", 415), ("", 200)):
        assert client.post(f"{MODEL}/infer", content=body, headers={"content-type": kind}).status_code == status
    answer = client.get(f"{MODEL}/infer")
    assert answer.status_code == 405
    assert isinstance(answer.json()["error"], str)
