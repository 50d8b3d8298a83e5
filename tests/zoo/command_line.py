"""The command line called in this process: what it printed, or the one line of a mistake."""

from collections.abc import Sequence

import pytest

from zoo.__main__ import main

BACKBONE = "test_vit"  # timm's own tiny model: 6 blocks of dim 64
Capture = pytest.CaptureFixture[str]


def asked(capsys: Capture, arguments: Sequence[str], status: int = 0) -> str:
    """Run a command in this process and return what it printed."""
    assert main(arguments) == status
    out, err = capsys.readouterr()
    assert err == ""
    return out


def refused(capsys: Capture, arguments: Sequence[str]) -> str:
    """Run a command that is a mistake and return its one line."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(f"python -m zoo {arguments[0]}: ")
    return err
