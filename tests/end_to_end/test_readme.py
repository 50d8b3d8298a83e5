"""Every command and every Python block of the README, run as printed.

The first two `sh` blocks, install and test, are run by CI. A command that keeps a port open is started, asked, and
stopped. The container's commands stand in a `console` block: `.ci/container` builds and runs the image.
"""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
COMMANDS = [
    line.partition("  #")[0].strip()
    for language, text in [block for block in BLOCKS if block[0] == "sh"][2:]
    for line in text.splitlines()
]
# a Python block whose first line is a file's name is that file; the others are one program
FILES = {
    text.partition("\n")[0].removeprefix("# "): text
    for language, text in BLOCKS
    if language == "python" and re.match(r"# \w+\.py\n", text)
}
ASKERS = ("curl", "python -m serve.client")
SERVERS = {"python -m serve": "/ready", "mlflow ui": "/health", "mlflow models serve": "/ping"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning"),
]


def is_server(command: str) -> bool:
    return f"{command} ".startswith(tuple(f"{start} " for start in SERVERS)) and "--help" not in command


@pytest.fixture(scope="module")
def desk(main_job: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the main job's folder, with what a reader's checkout and disk would hold."""
    folder = tmp_path_factory.mktemp("desk") / "main"
    shutil.copytree(main_job.folder, folder, symlinks=True)
    (folder / "accelerate_config.yaml").write_bytes((ROOT / "accelerate_config.yaml").read_bytes())
    for index in range(2 * 40):
        name = ("cats", "dogs")[index % 2]
        images = folder / "my_images" / name
        images.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (12, 10), (90 * (index % 2) + index, 120, 40)).save(images / f"{index}.jpg")
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def run(command: str, folder: Path, shell: dict[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=shell, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_first_two_blocks_are_one_command_line_each() -> None:
    first, second = [text for language, text in BLOCKS if language == "sh"][:2]
    assert len(first.splitlines()) == len(second.splitlines()) == 1
    assert first.strip().endswith("accelerate launch --config_file accelerate_config.yaml -m train")
    assert second.strip().endswith("-m pytest -n 2 --dist loadfile")


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith(("python", "accelerate"))])
def test_a_command_ends_well(command: str, desk: Path, shell: dict[str, str]) -> None:
    if is_server(command) or command.startswith(ASKERS):
        pytest.skip("run by the test of the servers")
    if "--num_processes 8" in command:  # the GPU line: as many ranks as two cores carry, and no training
        command = command.replace("--num_processes 8", "--num_processes 3") + " --dry-run"
    assert run(command, desk, shell)


def test_the_servers_answer_the_commands_that_ask_them(
    desk: Path, shell: dict[str, str], serve: Callable[..., Any], main_job: Any
) -> None:
    assert main_job.status == 0
    asked = [command for command in COMMANDS if command.startswith(ASKERS)]
    with ExitStack() as running:
        for command in filter(is_server, COMMANDS):
            words = shlex.split(re.sub(r" --port \d+", "", command))
            words[0] = sys.executable if words[0] == "python" else words[0]
            ready = next(path for start, path in SERVERS.items() if command.startswith(start))
            url = running.enter_context(serve(desk, *words, ready=ready))
            if command.startswith("python -m serve"):
                for ask in asked:
                    ask = ask.replace("curl", "curl -sf").replace("localhost:8000", url)
                    if ask.startswith("python"):
                        ask += f" --url {url}"
                    answer = run(ask, desk, shell)
                    assert re.search(r'"predictions"|"version"|\.png\t\d\t', answer), f"{ask}\n{answer}"


def test_every_command_is_of_a_kind_that_is_tested() -> None:
    kinds = ("python", "accelerate", *ASKERS, *SERVERS)
    assert [command for command in COMMANDS if not command.startswith(kinds)] == []
    assert len(COMMANDS) > 10


def test_the_python_blocks_run_one_after_the_other(desk: Path, shell: dict[str, str]) -> None:
    program = "\n".join(text for language, text in BLOCKS if language == "python" and text not in FILES.values())
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=desk, env=shell, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "attention modules -> parameter" in done.stdout
    assert "trainable, 1 note\n" in done.stdout
    assert "blocks.1.attn.proj.projection: is one tensor with blocks.0.attn.proj.projection" in done.stdout


def test_the_readmes_own_attention_is_twenty_lines() -> None:
    assert len(FILES["my_attention.py"].splitlines()) <= 20


def test_the_config_beside_the_readme_gives_two_ranks() -> None:
    text = (ROOT / "accelerate_config.yaml").read_text(encoding="utf-8")
    assert "num_processes: 2\n" in text
    assert "distributed_type: MULTI_GPU\n" in text
