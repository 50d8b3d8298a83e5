"""Every command of deploy/README.md: run, or, where it wants Docker or a cluster, called with a stand-in and read back.

What the stand-ins are asked to start is run elsewhere: the images by `.ci/container`, the batch script, the pods and
the server by the tests beside this one.
"""

import os
import re
import shlex
import shutil
import subprocess
import warnings
from itertools import pairwise
from pathlib import Path

import pytest

from tests.deploy.compose import read_compose
from train.load import parse_command_line

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "deploy" / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line for block in re.findall(r"^```sh\n(.*?)^```$", README, re.MULTILINE | re.DOTALL) for line in block.splitlines()
]
STAND_INS = ("docker", "sbatch", "kubectl")


def lines(start: str) -> list[str]:
    return [command for command in COMMANDS if command.startswith(start)]


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """A checkout, with commands first on the PATH that only write down their words."""
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    (tmp_path / "my_recipe.yaml").write_bytes((ROOT / "train" / "recipes" / "digits.yaml").read_bytes())
    (tmp_path / "bin").mkdir()
    for name in STAND_INS:
        (tmp_path / "bin" / name).write_text('#!/bin/sh\nprintf "%s\\n" "$@" >words\n')
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def run(command: str, desk: Path) -> list[str]:
    """Run a line; return the words that its stand-in got."""
    environ = os.environ | {"PATH": f"{desk / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(["bash", "-euo", "pipefail", "-c", command], cwd=desk, env=environ, check=True)
    return (desk / "words").read_text().splitlines()


def check_training(words: list[str], desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)
    parse_command_line(words)  # raises at the first word that is none


def test_every_line_is_of_a_kind_that_is_tested():
    kinds = (
        *STAND_INS,
        "echo ",
        "export ",
        "python -m train",
        "mlflow server",
    )
    assert [command for command in COMMANDS if not command.startswith(kinds)] == []
    assert len(COMMANDS) > 12


@pytest.mark.parametrize("command", lines("docker run"))
def test_container_trains_what_the_line_says(command, desk, monkeypatch):
    words = run(command, desk)
    image = words.index("attention-zoo-train")
    check_training(words[image + 1 :], desk, monkeypatch)
    launch = (ROOT / "deploy" / "launch").read_text(encoding="utf-8")
    for variable in (word.partition("=")[0] for option, word in pairwise(words[:image]) if option == "-e"):
        assert f"${{{variable}:" in launch or f"${variable}" in launch, variable


def test_image_is_built_from_the_dockerfiles_target_and_named_as_the_files_call_it(desk):
    (command,) = lines("docker build")
    words = run(command, desk)
    target, tag = words[words.index("--target") + 1], words[words.index("-t") + 1]
    assert f" AS {target}\n" in (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert read_compose({"POSTGRES_PASSWORD": "secret"})["mlflow"]["image"] == tag
    for manifest in ("trainjob.yaml", "mlflow/kubernetes.yaml"):
        assert f"image: {tag} #" in (ROOT / "deploy" / manifest).read_text(encoding="utf-8")


def test_server_finds_the_password_that_the_line_before_makes(desk):
    (secret,), (start,), (uri,) = lines("echo "), lines("docker compose"), lines("export MLFLOW_TRACKING_URI")
    words = run(f"{secret}\n{start}", desk)
    compose = desk / words[words.index("-f") + 1]
    name, _, value = (compose.parent / ".env").read_text().strip().partition("=")
    services = read_compose({name: value})
    assert len(services["mlflow"]["environment"]["PGPASSWORD"]) == 48
    assert services["mlflow"]["ports"] == ["127.0.0.1:5000:5000"]
    assert uri.endswith("=http://localhost:5000")


def test_server_without_docker_takes_its_options():
    (command,) = lines("mlflow server")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MLflow's own, of its own code
        from mlflow.cli import server

    context = server.make_context("server", shlex.split(command)[2:])
    assert (context.params["host"], context.params["port"]) == ("0.0.0.0", 5000)
    assert context.params["allowed_hosts"] == "localhost:*,tracking.example.com:5000"
    (variables,) = lines("export PGPASSWORD")
    moved = read_compose({"POSTGRES_PASSWORD": "..."})["mlflow"]["environment"]
    moved["MLFLOW_BACKEND_STORE_URI"] = moved["MLFLOW_BACKEND_STORE_URI"].replace("postgres:", "localhost:")
    for word in shlex.split(variables)[1:]:
        name, _, value = word.partition("=")
        assert moved[name] == value


@pytest.mark.parametrize("command", lines("sbatch"))
def test_batch_script_gets_its_options_and_the_training_its_own(command, desk, monkeypatch):
    words = run(command, desk)
    script = words.index("deploy/slurm.sbatch")
    assert (desk / words[script]).is_file()
    assert set(words[:script:2]) <= {"--nodes", "--gpus-per-node", "--time"}
    check_training([*words[script + 1 :], "--resume", "auto"], desk, monkeypatch)


@pytest.mark.parametrize("command", lines("kubectl"))
def test_cluster_gets_files_that_are_here_and_the_secret_that_they_name(command, desk):
    words = run(command, desk)
    if words[0] == "apply":
        assert (desk / words[words.index("-f") + 1]).is_file()
        return
    assert words[:3] == ["create", "secret", "generic"]
    key, _, value = words[4].removeprefix("--from-literal=").partition("=")
    manifest = (ROOT / "deploy" / "mlflow" / "kubernetes.yaml").read_text(encoding="utf-8")
    assert f"secretKeyRef: {{name: {words[3]}, key: {key}}}" in manifest
    assert len(value) == 48
