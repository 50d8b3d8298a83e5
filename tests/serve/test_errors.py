import subprocess
import sys

import pytest

from serve.errors import STATUSES, LocateError, ServeError
from zoo.errors import ImageError


def test_every_mistake_of_a_request_has_a_status_of_its_own() -> None:
    assert set(STATUSES) == {ImageError, *ServeError.__subclasses__()} - {LocateError}
    assert all(400 <= status < 500 for status, _ in STATUSES.values())
    assert len({code for _, code in STATUSES.values()}) == len(STATUSES)


@pytest.mark.slow
def test_the_endpoint_loads_neither_the_pyfunc_nor_the_trainer() -> None:
    code = (
        "import sys, serve.__main__\n"
        "wrong = {'mlflow.pyfunc', 'accelerate', 'train', 'serve.package', 'sklearn'} & set(sys.modules)\n"
        "sys.exit(', '.join(wrong) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
