import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from serve.app import create_app
from serve.client import Client
from serve.client.__main__ import main
from serve.predictor import Predictor
from serve.settings import Settings
from tests.serve.client.conftest import busy

ROOT = Path(__file__).parent.parent.parent.parent
COMMAND = [sys.executable, "-m", "serve.client"]


@pytest.fixture
def folder(tmp_path: Path, images: list[bytes]) -> Path:
    for i, image in enumerate(images):
        (tmp_path / f"{i}.png").write_bytes(image)
    return tmp_path


@pytest.fixture
def endpoint(settings: Settings, predictor: Predictor) -> Iterator[str]:
    """The real endpoint on a port of its own."""
    server = uvicorn.Server(uvicorn.Config(create_app(settings, predictor), port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


def test_it_names_what_the_real_endpoint_sees(endpoint, folder, images, predictor, capsys):
    async def ask() -> list[str]:
        async with Client(endpoint, model=predictor.name, top_k=2) as client:
            answers = await asyncio.gather(*map(client.predict, images))
        assert all(len(answer.top) == 2 for answer in answers)
        return [answer.label for answer in answers]

    labels = asyncio.run(ask())
    assert main([str(folder), "--url", endpoint]) == 0
    said = capsys.readouterr()
    rows = [line.split("\t") for line in said.out.splitlines()]
    assert [row[:2] for row in rows] == [[str(folder / f"{i}.png"), label] for i, label in enumerate(labels)]
    assert all(0 < float(row[2]) < 1 for row in rows)
    assert said.err == ""


def test_the_real_endpoints_refusals_are_told_one_by_one(endpoint, folder, capsys):
    (folder / "1.png").write_bytes(b"no image")
    assert main([str(folder), "--url", endpoint, "--json", "--top-k", "1"]) == 1
    said = capsys.readouterr()
    answers = [json.loads(line) for line in said.out.splitlines()]
    assert [Path(answer["image"]).name for answer in answers] == ["0.png", "2.png"]
    assert all(len(answer["top"]) == 1 for answer in answers)
    (line,) = said.err.splitlines()
    assert line.startswith(f"error: {folder / '1.png'}: answered 422: ")

    assert main([str(folder / "0.png"), "--url", endpoint, "--model", "cat"]) == 1
    assert ": answered 404: no such model here" in capsys.readouterr().err


def test_a_busy_endpoint_is_waited_for_and_the_key_is_sent(planted, folder, tmp_path, capsys):
    (tmp_path / "key").write_text("team:0123456789abcdef\n")
    planted.script = [busy(503, "0")]
    assert main([str(folder), "--url", planted.url, "--api-key-file", str(tmp_path / "key"), "--concurrency", "1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert len(planted.asked) == 4
    assert {headers["authorization"] for _, headers, _ in planted.asked} == {"Bearer 0123456789abcdef"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no.png"], "error: no.png: no such file or folder"),
        (["."], "no image in this folder"),
        (["x.png", "--url", "localhost:8000"], "error: 'localhost:8000' is no URL of an endpoint"),
        (["x.png", "--api-key-file", "no-file"], "error: no-file: the API key cannot be read: No such file"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_asked(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.png" if "x.png" in words else tmp_path / "x.txt").touch()
    assert main(words) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert len(said.err.splitlines()) == 1
    assert said.out == ""


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("concurrency", "0"),
        ("concurrency", "x"),
        ("top-k", "-1"),
        ("timeout", "nan"),
        ("timeout", "0"),
        ("retries", "1.5"),
    ],
)
def test_a_value_out_of_range_is_a_mistake(flag, value, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["x.png", f"--{flag}={value}"])
    assert caught.value.code == 2
    assert f"argument --{flag}: got '{value}', wanted" in capsys.readouterr().err


@pytest.mark.slow
def test_a_terminal_sees_progress_and_a_pipe_does_not(planted, folder):
    terminal, other_end = pty.openpty()
    termios.tcsetwinsize(other_end, (25, 80))
    done = subprocess.run(
        [*COMMAND, str(folder), "--url", planted.url], cwd=ROOT, stdout=subprocess.PIPE, stderr=other_end, check=True
    )
    os.close(other_end)
    assert len(done.stdout.splitlines()) == 3
    seen = os.read(terminal, 100_000)
    os.close(terminal)
    assert b"3/3" in seen


@pytest.mark.slow
def test_a_line_is_told_before_the_next_is_known(planted, folder):
    planted.held_from = 1
    words = [*COMMAND, str(folder), "--url", planted.url, "--concurrency", "1"]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    asking = subprocess.Popen(words, cwd=ROOT, env=environ, stdout=subprocess.PIPE)
    assert asking.stdout is not None
    assert asking.stdout.readline().startswith(str(folder / "0.png").encode())
    planted.release.set()
    assert len(asking.communicate(timeout=60)[0].splitlines()) == 2
    assert asking.returncode == 0


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_ends_it_quietly(planted, folder):
    command = f"{' '.join(COMMAND)} {folder} {folder} {folder} --url {planted.url} --concurrency 1 | head -1"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, check=True)
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == b""


@pytest.mark.slow
def test_ctrl_c_ends_it_without_a_trace(planted, folder):
    planted.held_from = 0
    command = [*COMMAND, str(folder), "--url", planted.url]
    listens = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731  # tests in the background ignore it
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, preexec_fn=listens) as asking:
        try:
            while not planted.asked:
                assert asking.poll() is None
                time.sleep(0.02)
            asking.send_signal(signal.SIGINT)
            assert asking.communicate(timeout=60)[1] == b""
            assert asking.returncode == 130
        finally:
            asking.kill()
            planted.release.set()


@pytest.mark.slow
@pytest.mark.parametrize("package", ["httpx", "tqdm"])
def test_without_a_package_it_says_what_to_install(tmp_path, package):
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError(name={package!r})")
    environ = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run([*COMMAND, "x.png"], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == f"error: {package} is not installed; pip install 'attention-zoo[client]'\n"
