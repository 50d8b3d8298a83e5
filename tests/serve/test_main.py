import base64
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve.__main__ import main, read_settings


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in [name for name in os.environ if name.startswith("SERVE_")]:
        monkeypatch.delenv(name)
    return monkeypatch


def test_the_command_line_wins_over_the_environment_over_the_defaults(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("SERVE_PORT", "9000")
    environment.setenv("SERVE_MAX_PIXELS", "77")
    settings = read_settings(["some/bundle", "--port", "9001"])
    assert (settings.model_uri, settings.port, settings.max_pixels) == ("some/bundle", 9001, 77)
    assert settings.host == "127.0.0.1"
    assert read_settings([]).model_uri == "models:/digits@champion"


@pytest.mark.parametrize(
    ("variable", "argv", "plugins"),
    [
        ("", [], ()),
        ("a.py", [], ("a.py",)),
        (f"/x/a.py{os.pathsep}b.py,my_package.attention", [], ("/x/a.py", "b.py", "my_package.attention")),
        ("a.py", ["--plugins", "b.py"], ("b.py",)),
        ("", ["--plugins", "a.py,b.py", "--plugins", "c.py"], ("a.py", "b.py", "c.py")),
    ],
)
def test_plugins_come_from_the_environment_or_the_line(
    environment: pytest.MonkeyPatch, variable: str, argv: list[str], plugins: tuple[str, ...]
) -> None:
    environment.setenv("SERVE_PLUGINS", variable)
    assert read_settings(argv).plugins == plugins


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--plugins", "nowhere.py"], r"error: plugin nowhere\.py: no such file below"),
        (["--plugins", "other.py"], r"error: plugin other\.py, line 1: ZeroDivisionError"),
        (
            [],
            r"error: .*card\.json: attention 'mine' is not registered here: .* give it by --plugins my_attention\.py",
        ),
    ],
)
def test_a_plugin_that_is_missing_is_the_users_mistake(
    environment: pytest.MonkeyPatch,
    plugin_bundle: Path,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    message: str,
) -> None:
    environment.chdir(plugin_bundle.parent)
    Path("other.py").write_text("1 / 0")
    assert main([str(plugin_bundle), "--port", "0", *argv]) == 2
    error = capsys.readouterr().err
    assert re.match(message, error), error
    assert error.count("\n") == 1


@pytest.mark.usefixtures("own_plugins")
def test_plugins_are_loaded_before_the_bundle(
    environment: pytest.MonkeyPatch, plugin_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment.chdir(plugin_bundle.parent)
    environment.setattr("serve.__main__._run", lambda *_: None)
    assert main([str(plugin_bundle), "--port", "0", "--plugins", "my_attention.py"]) == 0
    assert "vit_tiny_patch16_224, mine attention, 3 classes" in capsys.readouterr().out


def test_help_explains_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for word in (
        "MODEL_URI",
        "models:/NAME@ALIAS",
        "--max-body-bytes",
        "--max-pixels",
        "in pixels",
        "SERVE_PORT",
        "--plugins",
        "separated by",
    ):
        assert word in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--port", "70000"], "error: port: .*less than or equal to 65535"),
        (["--max-body-bytes", "0"], "error: max_body_bytes: .*greater than or equal to 1"),
        (["--max-pixels", "many"], "error: max_pixels: got 'many', input should be a valid integer"),
        (["nowhere"], "error: nowhere: no bundle here"),
        (["models:/x/latest"], "error: models:/x/latest: wanted is models:/NAME@ALIAS"),
        (["--host", "256.256.256.256"], "error: cannot listen on 256.256.256.256"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_2(
    environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert environment
    assert main([*argv, "--port", "0"] if "--port" not in argv else argv) == 2
    error = capsys.readouterr().err
    assert re.match(message, error), error
    assert error.count("\n") == 1


def test_a_port_in_use_is_told_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["nowhere", "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err


def test_a_damaged_bundle_is_a_fault_found(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in bundle.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = bytearray((tmp_path / "model.safetensors").read_bytes())
    weights[-100:] = bytes(100)
    (tmp_path / "model.safetensors").write_bytes(weights)
    assert main([str(tmp_path), "--port", "0"]) == 3
    assert "model.safetensors: damaged, it is not the file that was written" in capsys.readouterr().err


@pytest.fixture
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """`python -m serve` as a process, in a C locale; the parameter is what follows."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    env |= {"PYTHONPATH": str(Path.cwd())}
    command = [sys.executable, "-m", "serve", *request.param(request), "--port", "0"]
    process = subprocess.Popen(
        command, env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
    )
    yield process
    process.kill()
    process.communicate()


def local(request: pytest.FixtureRequest) -> list[str]:
    return [str(request.getfixturevalue("bundle"))]


@pytest.mark.slow
@pytest.mark.parametrize("server", [local], indirect=True)
def test_a_real_process_answers_over_http_and_leaves_with_0_at_sigterm(
    server: subprocess.Popen[str], images: list[bytes]
) -> None:
    assert server.stdout
    first = server.stdout.readline()
    assert first.startswith("serving tiny version local on http://127.0.0.1:")
    curl = server.stdout.readline().split()
    assert curl[:3] == ["curl", "-H", "'Content-Type:"]
    url = curl[-1]
    with urllib.request.urlopen(url.replace("/invocations", "/ready"), timeout=30) as ready:
        assert ready.status == 200
    request = urllib.request.Request(url, images[0], {"content-type": "image/png"})
    with urllib.request.urlopen(request, timeout=30) as response:
        raw = json.load(response)
        assert (response.headers["x-model-name"], response.headers["x-model-version"]) == ("tiny", "local")
    body = json.dumps({"instances": [base64.b64encode(images[0]).decode()]}).encode()
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        assert json.load(response) == raw
    assert {score["label"] for score in raw["predictions"][0]["top"]} == {"日本 語", "é", "ash"}
    server.send_signal(signal.SIGTERM)
    _, errors = server.communicate(timeout=30)
    assert server.returncode == 0, errors
    assert errors == ""
