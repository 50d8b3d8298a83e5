"""MLflow's scoring protocol, asked rightly: every form of request gives the model's own answer."""

import io
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, unquote

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from serve.predictor import Predictor
from zoo.bundle import load_bundle
from zoo.preprocess import preprocess


@pytest.fixture
def expected(predictor: Predictor, images: list[bytes]) -> list[dict[str, object]]:
    """What the model itself says, without HTTP."""
    inputs = np.stack([preprocess(image, predictor.card.preprocessing) for image in images])
    return [prediction.model_dump() for prediction in predictor.label(inputs)]


FORMS: dict[str, Callable[[list[str]], object]] = {
    "split": lambda t: {"dataframe_split": {"columns": ["image"], "data": [[x] for x in t]}},
    "split with index": lambda t: {
        "dataframe_split": {"columns": ["image"], "index": [5, 6, 7], "data": [[x] for x in t]}
    },
    "records": lambda t: {"dataframe_records": [{"image": x} for x in t]},
    "inputs by column": lambda t: {"inputs": {"image": t}},
    "inputs as list": lambda t: {"inputs": t},
    "instances by record": lambda t: {"instances": [{"image": x} for x in t]},
    "instances as list": lambda t: {"instances": t},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_json_form_gives_the_models_own_answer(
    client: TestClient, texts: list[str], expected: list[object], form: str
) -> None:
    response = client.post("/invocations", json=FORMS[form](texts))
    assert response.status_code == 200, response.text
    assert response.json() == {"predictions": expected}


def test_raw_bytes_give_the_same_answer(client: TestClient, images: list[bytes], expected: list[dict]) -> None:
    for kind in ("image/png", "image/jpeg", "application/octet-stream"):  # the bytes say what they are
        response = client.post("/invocations", content=images[1], headers={"content-type": kind})
        (prediction,) = response.json()["predictions"]
        assert prediction["label"] == expected[1]["label"]
        assert prediction["probability"] == pytest.approx(expected[1]["probability"], abs=1e-6)  # a batch of one


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16"])
def test_an_image_of_any_colour_mode_is_answered(client: TestClient, mode: str) -> None:
    file = io.BytesIO()
    Image.new(mode, (20, 10)).save(file, "TIFF")
    response = client.post("/invocations", content=file.getvalue(), headers={"content-type": "image/tiff"})
    assert response.status_code == 200, response.text
    assert len(response.json()["predictions"]) == 1


def test_multipart_files_are_answered_in_order(client: TestClient, images: list[bytes], expected: list[dict]) -> None:
    files = [("any", (f"日本{i}.png", image, "image/png")) for i, image in enumerate(images)]
    assert client.post("/invocations", files=files).json() == {"predictions": expected}


@pytest.mark.parametrize("form", ["inputs", "instances", "column"])
def test_float_tensors_are_taken_as_they_are(
    client: TestClient, predictor: Predictor, images: list[bytes], expected: list[dict], form: str
) -> None:
    tensor = np.stack([preprocess(image, predictor.card.preprocessing) for image in images[:1]])
    body = {"inputs": {"image": tensor.tolist()}} if form == "column" else {form: tensor.tolist()}
    (prediction,) = client.post("/invocations", json=body).json()["predictions"]
    assert prediction["probability"] == pytest.approx(expected[0]["probability"], abs=1e-6)


def test_answers_are_probabilities_in_order_and_differ(expected: list[dict]) -> None:
    for prediction in expected:
        scores = [score["probability"] for score in prediction["top"]]
        assert scores == sorted(scores, reverse=True)
        assert sum(scores) == pytest.approx(1, abs=1e-6)
        assert (prediction["label"], prediction["probability"]) == (prediction["top"][0]["label"], scores[0])
    assert len({prediction["probability"] for prediction in expected}) == 3


def test_top_k_bounds_the_list(client: TestClient, texts: list[str]) -> None:
    for top_k, length in ((1, 1), (2, 2), (99, 3)):
        body = {"instances": texts[:1], "params": {"top_k": top_k}}
        assert len(client.post("/invocations", json=body).json()["predictions"][0]["top"]) == length


def test_class_and_model_names_outside_ascii_round_trip(client: TestClient, texts: list[str], bundle: Path) -> None:
    response = client.post("/invocations", json={"instances": texts[:1]})
    labels = {score["label"] for score in response.json()["predictions"][0]["top"]}
    assert labels == set(load_bundle(bundle)[1].class_names) == {"日本 語", "é", "ash"}
    assert unquote(response.headers["x-model-name"]) == "数字 model"
    assert response.headers["x-model-version"] == "7"


def test_top_k_stands_in_the_query_where_the_body_is_an_image(client: TestClient, images: list[bytes]) -> None:
    raw = client.post("/invocations?top_k=2", content=images[0], headers={"content-type": "image/png"})
    form = client.post("/invocations?top_k=2", files=[("f", ("a.png", images[0]))])
    assert [len(answer.json()["predictions"][0]["top"]) for answer in (raw, form)] == [2, 2]


def test_top_k_of_the_query_counts_for_json_that_says_nothing(client: TestClient, texts: list[str]) -> None:
    answer = client.post("/invocations?top_k=1", json={"instances": texts[:1]})
    assert len(answer.json()["predictions"][0]["top"]) == 1


@pytest.mark.parametrize(
    "query", ["top_k=0", "top_k=-1", "top_k=", "top_k=1.0", "top_k=1&top_k=2", "topk=1", "top_k=9999999999999999999"]
)
def test_a_query_that_is_not_understood_is_400(client: TestClient, images: list[bytes], query: str) -> None:
    answer = client.post(f"/invocations?{query}", content=images[0], headers={"content-type": "image/png"})
    assert answer.status_code == 400
    assert "top_k" in answer.json()["error"]["message"]


def test_top_k_in_both_places_is_400(client: TestClient, texts: list[str]) -> None:
    answer = client.post("/invocations?top_k=1", json={"instances": texts[:1], "params": {"top_k": 1}})
    assert answer.status_code == 400
    assert "in the query and params in the body" in answer.json()["error"]["message"]


def test_a_model_is_asked_by_its_name(client: TestClient, images: list[bytes], expected: list[dict]) -> None:
    name = quote("数字 model")
    kind = {"content-type": "image/png"}
    answer = client.post(f"/models/{name}/invocations", content=images[1], headers=kind)
    assert answer.status_code == 200, answer.text
    assert answer.json()["predictions"][0]["label"] == expected[1]["label"]
    assert unquote(answer.headers["x-model-name"]) == "数字 model"
    assert client.post("/models/other/invocations", content=images[1], headers=kind).status_code == 404


@pytest.mark.parametrize("form", ["rows", "records", "column"])
def test_a_tensor_may_come_row_by_row(
    client: TestClient, predictor: Predictor, images: list[bytes], expected: list[dict], form: str
) -> None:
    rows = [preprocess(image, predictor.card.preprocessing).tolist() for image in images]
    bodies = {
        "rows": {"instances": rows},
        "records": {"instances": [{"image": row} for row in rows]},
        "column": {"inputs": {"image": rows}},
    }
    predictions = client.post("/invocations", json=bodies[form]).json()["predictions"]
    assert [p["label"] for p in predictions] == [p["label"] for p in expected]
    for got, wanted in zip(predictions, expected, strict=True):
        assert got["probability"] == pytest.approx(wanted["probability"], abs=1e-6)
