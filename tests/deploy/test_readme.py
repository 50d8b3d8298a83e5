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

from serve.client.__main__ import parse_command
from serve.models.uris import parse_uris
from serve.operations.keys import read_keys
from serve.settings import Settings
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
        "mkdir ",
        "python -m serve.client",
        "python -m train",
        "mlflow server",
    )
    assert [command for command in COMMANDS if not command.startswith(kinds)] == []
    assert len(COMMANDS) > 12


def names_image(command: str, image: str) -> bool:
    return image in command.split()


@pytest.mark.parametrize("command", [line for line in lines("docker run") if names_image(line, "attention-zoo-train")])
def test_container_trains_what_the_line_says(command, desk, monkeypatch):
    words = run(command, desk)
    image = words.index("attention-zoo-train")
    check_training(words[image + 1 :], desk, monkeypatch)
    launch = (ROOT / "deploy" / "launch").read_text(encoding="utf-8")
    for variable in (word.partition("=")[0] for option, word in pairwise(words[:image]) if option == "-e"):
        assert f"${{{variable}:" in launch or f"${variable}" in launch, variable


def test_image_is_built_from_the_dockerfiles_target_and_named_as_the_files_call_it(desk):
    (command,) = lines("docker build --target train")
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


ENDPOINTS = [line for line in lines("docker run") if not names_image(line, "attention-zoo-train")]


@pytest.mark.parametrize("command", ENDPOINTS)
def test_endpoint_gets_settings_that_it_has_and_what_it_may_not_do_without(command, desk):
    words = run(command, desk)
    options = [pair for pair in pairwise(words[:-1]) if pair[0] in ("-e", "-p", "-v", "--tmpfs", "--cap-drop")]
    assert {("--tmpfs", "/tmp"), ("--cap-drop", "ALL"), ("-p", f"{Settings().port}:{Settings().port}")} <= set(options)
    assert "--read-only" in words
    given = dict(word.split("=", 1) for option, word in options if option == "-e")
    known = {f"SERVE_{name.upper()}" for name in Settings.model_fields} | {"MLFLOW_TRACKING_URI"}
    assert set(given) <= known
    for uri in parse_uris([given["SERVE_MODEL_URI"]] if "SERVE_MODEL_URI" in given else []):
        assert uri.folder is None or f":{uri.folder}:ro" in words[words.index("-v") + 1]
    built = [run(each, desk) for each in lines("docker build")]
    assert words[-1] in {each[each.index("-t") + 1] for each in built}


def test_a_baked_in_bundle_is_where_the_build_looks_for_it(desk):
    (copy,), (build,) = lines("mkdir -p bundles"), lines("docker build --build-arg")
    folder = desk / "runs" / "digits" / "some-run" / "bundle"
    folder.mkdir(parents=True)
    (folder / "card.json").touch()
    (folder.parent.parent / "latest").symlink_to("some-run")
    words = run(f"{copy}\n{build}", desk)
    name, _, model = words[words.index("--build-arg") + 1].partition("=")
    assert f'ARG {name}=""' in (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert (desk / model / "card.json").is_file()
    assert model.startswith("bundles/")


def test_client_takes_its_options_and_asks_where_the_container_answers():
    (command,) = lines("python -m serve.client")
    options = parse_command(shlex.split(command)[3:])
    assert options.url == f"http://localhost:{Settings().port}"
    assert options.images == [Path("runs/digits/examples")], "where a training leaves some"


@pytest.mark.parametrize("command", lines("kubectl"))
def test_cluster_gets_files_that_are_here_and_the_secret_that_they_name(command, desk):
    words = run(command, desk)
    if words[0] == "apply":
        assert (desk / words[words.index("-f") + 1]).is_file()
        return
    assert words[:3] == ["create", "secret", "generic"]
    key, _, value = words[4].removeprefix("--from-literal=").partition("=")
    if words[3] == "attention-zoo-keys":
        assert command in (ROOT / "deploy" / "serve" / "kubernetes.yaml").read_text(encoding="utf-8")
        (desk / "keys").write_text(value)
        assert list(read_keys(desk / "keys")) == ["team"]
        return
    manifest = (ROOT / "deploy" / "mlflow" / "kubernetes.yaml").read_text(encoding="utf-8")
    assert f"secretKeyRef: {{name: {words[3]}, key: {key}}}" in manifest
    assert len(value) == 48
