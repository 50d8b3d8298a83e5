"""Triton's own client against our server."""

import base64
import warnings
from collections.abc import Iterator

import numpy as np
import pytest

from serve.predictor import Predictor
from tests.serve.wire.conftest import Wire
from zoo.preprocess import preprocess

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own dependencies
    from tritonclient import http as triton
    from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.slow

NAME = "tiny"


@pytest.fixture
def client(wire: Wire) -> Iterator[triton.InferenceServerClient]:
    client = triton.InferenceServerClient(wire.url.removeprefix("http://"))
    yield client
    client.close()


def build_input(array: np.ndarray, kind: str, *, binary: bool) -> triton.InferInput:
    given = triton.InferInput("image", list(array.shape), kind)
    given.set_data_from_numpy(array, binary_data=binary)
    return given


def test_server_and_model_describe_themselves(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(NAME)
    assert not client.is_model_ready("other")
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    metadata = client.get_model_metadata(NAME, "local")
    assert [output["name"] for output in metadata["outputs"]] == ["probabilities", "label"]


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
@pytest.mark.parametrize("kind", ["BYTES", "FP32"])
def test_inference_gives_the_models_own_numbers(
    client: triton.InferenceServerClient,
    predictor: Predictor,
    images: list[bytes],
    kind: str,
    binary_in: bool,
    binary_out: bool,
) -> None:
    tensor = np.stack([preprocess(image, predictor.card.preprocessing) for image in images])
    files = np.array([image if binary_in else base64.b64encode(image) for image in images], dtype=np.object_)
    given = build_input(files if kind == "BYTES" else tensor, kind, binary=binary_in)
    wanted = [triton.InferRequestedOutput(output, binary_data=binary_out) for output in ("label", "probabilities")]
    result = client.infer(NAME, [given], outputs=wanted, request_id="a-1", model_version="local")
    probabilities = predictor.predict(tensor)
    np.testing.assert_allclose(result.as_numpy("probabilities"), probabilities, atol=1e-6)
    labels = [label.decode() if isinstance(label, bytes) else label for label in result.as_numpy("label")]
    assert labels == [predictor.card.class_names[k] for k in probabilities.argmax(1)]
    assert result.get_response()["id"] == "a-1"


def test_without_outputs_all_come_as_binary(client: triton.InferenceServerClient, images: list[bytes]) -> None:
    given = build_input(np.array(images, dtype=np.object_), "BYTES", binary=True)
    result = client.infer(NAME, [given])
    assert result.as_numpy("probabilities").shape == (3, 3)
    assert result.as_numpy("label").shape == (3,)


def test_a_mistake_is_the_clients_exception_with_our_words(client: triton.InferenceServerClient) -> None:
    given = build_input(np.array([b"hello"], dtype=np.object_), "BYTES", binary=True)
    with pytest.raises(InferenceServerException, match="not an image") as caught:
        client.infer(NAME, [given])
    assert caught.value.status() == "422"
    with pytest.raises(InferenceServerException, match="no such model"):
        client.infer("other", [given])
    with pytest.raises(InferenceServerException, match="content encoding"):
        client.infer(NAME, [given], request_compression_algorithm="gzip")
