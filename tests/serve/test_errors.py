import subprocess
import sys

import pytest

from serve.errors import (
    STATUSES,
    EngineError,
    KeyFileError,
    LocateError,
    OutOfReachError,
    RetryError,
    ServeError,
    SettingsError,
)
from zoo.errors import ImageError

AT_THE_START = {EngineError, KeyFileError, LocateError, OutOfReachError, SettingsError}


def leaves(kind: type[ServeError]) -> set[type[ServeError]]:
    return {kind, *(leaf for child in kind.__subclasses__() for leaf in leaves(child))}


def test_every_mistake_of_a_request_has_a_status_of_its_own() -> None:
    assert set(STATUSES) == {ImageError, *leaves(ServeError)} - {ServeError, RetryError} - AT_THE_START
    assert all(400 <= status < 500 or status in (503, 504) for status, _ in STATUSES.values())
    assert len({code for _, code in STATUSES.values()}) == len(STATUSES)


def test_what_may_be_sent_again_says_when() -> None:
    assert {kind for kind, (status, _) in STATUSES.items() if status in (429, 503)} == {
        kind for kind in STATUSES if issubclass(kind, RetryError)
    }
    assert RetryError("full").retry_after_s == 1


@pytest.mark.slow
def test_the_endpoint_loads_neither_the_trainer_nor_torch_nor_mlflow_to_begin_with() -> None:
    code = (
        "import sys, serve.__main__\n"
        "wrong = {'mlflow', 'torch', 'timm', 'accelerate', 'train', 'serve.package', 'sklearn', 'sqlalchemy'}\n"
        "sys.exit(', '.join(wrong & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
