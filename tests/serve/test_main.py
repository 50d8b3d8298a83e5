import base64
import json
import logging
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve.__main__ import allow_files, main
from zoo import list_attentions


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """No settings but the test's own; what `main` does to logging is undone."""
    for name in [name for name in os.environ if name.startswith("SERVE_")]:
        monkeypatch.delenv(name)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield monkeypatch
    root.handlers[:] = handlers
    root.setLevel(level)


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
    seen: list[str] = []
    environment.setattr("serve.__main__._serve", lambda *_: seen.extend(list_attentions()))
    assert main([str(plugin_bundle), "--port", "0", "--plugins", "my_attention.py"]) == 0
    assert "mine" in seen
    assert capsys.readouterr().err == ""


def test_a_plugin_where_torch_is_missing_is_one_line(
    environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(_names: object) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    environment.setattr("zoo.plugins.load_plugins", load)
    assert main(["bundle", "--port", "0", "--plugins", "my_attention.py"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --plugins: a plugin takes torch, which is not installed here; ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--port", "70000"], "error: --port: .*less than or equal to 65535"),
        (["--prot", "80"], "error: unknown flag --prot, did you mean '--port'"),
        (["--api-keys-file", "nowhere"], "error: API keys nowhere: cannot be read: No such file or directory"),
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


@pytest.mark.parametrize(
    ("soft", "hard", "allowed", "warns"),
    [(1024, 4096, 1128, False), (1024, 1100, 1100, True), (8192, 8192, None, False), (64, -1, 1128, False)],
)
def test_open_files_are_allowed_for_all_connections(
    environment: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    soft: int,
    hard: int,
    allowed: int | None,
    *,
    warns: bool,
) -> None:
    assert resource.RLIM_INFINITY == -1
    wanted: list[tuple[int, int]] = []
    environment.setattr(resource, "getrlimit", lambda _: (soft, hard))
    environment.setattr(resource, "setrlimit", lambda _, limits: wanted.append(limits))
    allow_files(1000)
    assert wanted == ([] if allowed is None else [(allowed, hard)])
    assert [message.split(" (")[0] for message in caplog.messages] == ["1100 open files are allowed"] * warns


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


def ask(connection: socket.socket, path: str) -> bytes:
    """Ask once on a connection of its own, so that the server has nothing to wait for."""
    connection.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.slow
@pytest.mark.parametrize("server", [local], indirect=True)
def test_a_real_process_answers_and_at_sigterm_finishes_what_has_begun(
    server: subprocess.Popen[str], images: list[bytes]
) -> None:
    assert server.stdout
    first = server.stdout.readline()
    assert first.startswith("serving tiny version local on http://127.0.0.1:")
    assert server.stdout.readline() == "try\n"
    url = server.stdout.readline().split()[-1]
    address = ("127.0.0.1", int(url.split(":")[2].partition("/")[0]))
    with urllib.request.urlopen(url.replace("/invocations", "/ready"), timeout=30) as ready:
        assert ready.status == 200
    request = urllib.request.Request(url, images[0], {"content-type": "image/png", "x-request-id": "mine"})
    with urllib.request.urlopen(request, timeout=30) as response:
        raw = json.load(response)
        assert (response.headers["x-model-name"], response.headers["x-model-version"]) == ("tiny", "local")
        assert response.headers["x-request-id"] == "mine"
    body = json.dumps({"instances": [base64.b64encode(images[0]).decode()]}).encode()
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        assert json.load(response) == raw
    assert {score["label"] for score in raw["predictions"][0]["top"]} == {"日本 語", "é", "ash"}
    with socket.create_connection(address, timeout=30) as slow:
        head = f"POST /invocations HTTP/1.1\r\nhost: x\r\ncontent-type: image/png\r\ncontent-length: {len(images[0])}"
        slow.sendall(f"{head}\r\n\r\n".encode() + images[0][:1000])
        for _ in range(100):  # the request has begun when it and the one for the metrics are in flight
            with socket.create_connection(address, timeout=30) as connection:
                if b"serve_requests_in_flight 2.0" in ask(connection, "/metrics"):
                    break
        server.send_signal(signal.SIGTERM)
        with pytest.raises(OSError, match=r"Connection (refused|reset)"):  # noqa: PT012 (until it is)
            while True:
                with socket.create_connection(address, timeout=30):
                    pass
        slow.sendall(images[0][1000:])
        answer = b"".join(iter(lambda: slow.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b"\r\nconnection: close\r\n" in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2]) == raw
    _, errors = server.communicate(timeout=30)
    assert server.returncode == 0, errors
    assert re.search(
        r"serve.access: POST /invocations 200 ms=.* model=tiny version=local images=1 request_id=mine", errors
    )
    assert "SIGTERM: not ready any more" in errors
    assert not re.search("Traceback|WARNING|ERROR", errors), errors
