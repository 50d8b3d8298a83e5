"""OpenAPI is good enough to generate a client from, and that client works."""

import importlib
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import httpx
import pytest

from tests.serve.wire.conftest import Wire

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def generated(wire: Wire, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    folder = tmp_path_factory.mktemp("generated")
    (folder / "openapi.json").write_text(httpx.get(f"{wire.url}/openapi.json").text)
    command = [Path(sys.executable).with_name("openapi-python-client"), "generate", "--path", "openapi.json"]
    env = {"PATH": str(Path(sys.executable).parent)}  # it formats what it writes
    subprocess.run([*command, "--output-path", "zoo_client", "--meta", "none"], cwd=folder, env=env, check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        client = importlib.import_module("zoo_client")
        for module in ("api.scoring.invoke", "api.scoring.invoke_model", "api.open_inference.infer", "models", "types"):
            importlib.import_module(f"zoo_client.{module}")
    return client


@pytest.fixture
def client(generated: ModuleType, wire: Wire) -> Iterator[object]:
    with generated.Client(base_url=wire.url) as client:
        yield client


def test_it_sends_json_bytes_and_forms(
    generated: ModuleType, client: object, images: list[bytes], texts: list[str]
) -> None:
    models, types, invoke = generated.models, generated.types, generated.api.scoring.invoke
    params = models.Params(top_k=2)
    replies = [
        invoke.sync(client=client, body=models.Invocation(instances=texts[:1], params=params)),
        invoke.sync(client=client, body=types.File(payload=io.BytesIO(images[0])), top_k=2),
        invoke.sync(
            client=client,
            body=models.ImageFiles(images=[types.File(payload=io.BytesIO(images[0]), file_name="a.png")]),
            top_k=2,
        ),
        generated.api.scoring.invoke_model.sync(
            "tiny", client=client, body=models.Invocation(inputs=texts[:1], params=params)
        ),
    ]
    assert all(isinstance(reply, models.Reply) for reply in replies), replies
    assert all(reply == replies[0] for reply in replies)
    assert len(replies[0].predictions[0].top) == 2


def test_it_reads_errors(generated: ModuleType, client: object) -> None:
    models = generated.models
    answer = generated.api.scoring.invoke.sync_detailed(client=client, body=models.Invocation(instances=["aGk="]))
    assert answer.status_code == 422
    assert answer.parsed.error.code == "bad_image"


def test_it_speaks_open_inference(generated: ModuleType, client: object, texts: list[str]) -> None:
    models = generated.models
    given = models.InferInput.from_dict({"name": "image", "datatype": "BYTES", "shape": [1], "data": texts[:1]})
    reply = generated.api.open_inference.infer.sync(
        "tiny", client=client, body=models.InferRequest(inputs=[given], id="a")
    )
    assert [output.name for output in reply.outputs] == ["probabilities", "label"]
    assert (reply.id, reply.model_name) == ("a", "tiny")


def test_the_document_names_every_route_and_every_error(wire: Wire) -> None:
    document = httpx.get(f"{wire.url}/openapi.json").json()
    assert "HTTPValidationError" not in json.dumps(document)
    assert set(document["paths"]["/invocations"]["post"]["requestBody"]["content"]) == {
        "application/json",
        "multipart/form-data",
        "application/octet-stream",
        "image/*",
    }
    for path, form in (("/invocations", "ErrorReply"), ("/v2/models/{name}/infer", "ErrorV2")):
        replies = document["paths"][path]["post"]["responses"]
        assert set(replies) >= {"400", "401", "404", "408", "413", "415", "422", "429", "500", "503", "504"}
        assert form in json.dumps(replies["422"])
