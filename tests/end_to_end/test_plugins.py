"""A variant out of a user's own file: trained, registered, loaded elsewhere, served; nothing of ours knows its name."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.slow

PLUGIN = '''"""Attention with a learned temperature for each head, 1 at the start."""

import torch
from torch import nn

import zoo


@zoo.register_attention("temperature")
class TemperatureAttention(zoo.Attention):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.temperature = nn.Parameter(torch.ones(self.num_heads, 1, 1))

    def attend(self, q, k, v, **masks):
        return super().attend(q * self.temperature, k, v, **masks)
'''
LOAD = """
import sys
from pathlib import Path
import zoo
from zoo.bundle import check_golden
zoo.load_plugins(sys.argv[2:])
model, card = zoo.load_bundle(Path(sys.argv[1]))
print(check_golden(model, Path(sys.argv[1])), type(model.blocks[0].attn).__name__, card.plugins[0].name)
print(sum(float((block.attn.temperature - 1).abs().sum()) for block in model.blocks) > 0)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder, with one file of his own in it."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "my_attention.py").write_text(PLUGIN)
    return folder


@pytest.fixture(scope="module")
def run(folder: Path, shell: dict[str, str]) -> Any:
    """Run a command of this Python in the folder."""

    def run_(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=folder, env=shell, capture_output=True, text=True, timeout=600, check=False)

    return run_


@pytest.fixture(scope="module")
def bundle(folder: Path, run: Any) -> Path:
    """Two epochs of digits with the file's variant, in one process; the bundle that came out."""
    flags = ["--name", "mine", "--model.attention", "temperature", "--model.plugins", "my_attention.py"]
    flags += ["--publish.engine", "eager"]  # which needs the file where it is served
    done = run("-m", "train", *flags, "--schedule.epochs", "2", "--schedule.warmup_epochs", "1")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "attention temperature" in done.stdout
    assert re.search(r"^audit     \d+ parameters, \d+ trainable, 0 findings", done.stdout, re.MULTILINE), done.stdout
    assert "registry  mine version 1, @champion -> version 1" in done.stdout
    assert "-m serve models:/mine@champion --plugins my_attention.py\n" in done.stdout
    return folder / "runs/mine/latest/bundle"


@pytest.fixture(scope="module")
def endpoint(folder: Path, bundle: Path, serve: Any) -> Iterator[str]:
    command = (sys.executable, "-m", "serve", "models:/mine@champion", "--plugins", "my_attention.py")
    assert bundle
    with serve(folder, *command) as url:
        yield url


def test_a_fresh_process_loads_the_bundle_with_the_file(bundle: Path, run: Any) -> None:
    done = run("-c", LOAD, str(bundle), "my_attention.py")
    assert done.returncode == 0, done.stderr
    first, learned = done.stdout.splitlines()
    assert first.split()[1:] == ["TemperatureAttention", "my_attention.py"]
    assert float(first.split()[0]) < 1e-3
    assert learned == "True", "the variant's own parameters have learned"


def test_without_the_file_the_bundle_says_how_to_give_it(bundle: Path, run: Any) -> None:
    done = run("-c", LOAD, str(bundle))
    assert done.returncode != 0
    last = done.stderr.splitlines()[-1]
    assert re.match(r"zoo\.errors\.MissingPluginError: .*card\.json: attention 'temperature' is not registered", last)
    assert "--plugins my_attention.py or SERVE_PLUGINS=my_attention.py, in Python by zoo.load_plugins(" in last
    served = run("-m", "serve", "models:/mine@champion", "--port", "0")
    assert served.returncode == 2
    assert served.stderr.count("\n") == 1, served.stderr


def test_no_code_is_in_the_bundle(bundle: Path) -> None:
    assert {file.suffix for file in bundle.iterdir()} == {".json", ".safetensors"}


def test_the_endpoint_answers_with_it(folder: Path, endpoint: str) -> None:
    image = (folder / "runs/mine/examples/3.png").read_bytes()
    answer = httpx.post(f"{endpoint}/invocations", content=image, headers={"content-type": "image/png"})
    (prediction,) = answer.json()["predictions"]
    assert prediction["label"] in map(str, range(10))
    assert (answer.headers["x-model-name"], answer.headers["x-model-version"]) == ("mine", "1")


def test_a_plugin_that_is_not_there_stops_a_training_in_one_line(run: Any, folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    done = run("-m", "train", "--model.attention", "temperature", "--model.plugins", "my_atention.py")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: plugin my_atention.py: no such file below")
    assert "did you mean 'my_attention.py'?" in done.stderr
    assert sorted(folder.rglob("*")) == before
