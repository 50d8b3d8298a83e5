import pytest

from serve.errors import EngineError, LocateError
from serve.models.load import explain
from zoo.errors import BundleError


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (BundleError("/tmp/serve-x1/y/model.safetensors: damaged"), "model.safetensors: damaged"),
        (BundleError("damaged (/srv/a b/c.json)"), "damaged (a b/c.json)"),
        (LocateError("models:/digits@champion: version 3 holds no bundle"), None),
        (EngineError("engine onnx takes serve.engines/x and 1/2 of a"), None),
        (BundleError("two\nlines"), "two lines"),
        (RuntimeError("/SECRET"), "it fails here (RuntimeError); see the server's log"),
        (ValueError("SECRET"), "it fails here (ValueError); see the server's log"),
        (BundleError("x" * 1000), "x" * 300),
    ],
)
def test_a_reason_is_one_line_without_a_folder_of_this_machine(error: Exception, reason: str | None) -> None:
    assert explain(error) == (str(error) if reason is None else reason)
