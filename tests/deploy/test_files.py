"""Every file below deploy/ is whole: it parses, it fits its schema, and the files agree with one another."""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from mlflow.server.security_utils import is_allowed_host_header

from tests.deploy.compose import read_compose

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
SCRIPTS = [DEPLOY / "launch", DEPLOY / "slurm.sbatch", *(ROOT / ".ci").iterdir()]
MANIFESTS = [DEPLOY / "trainjob.yaml", DEPLOY / "mlflow" / "kubernetes.yaml"]
CUSTOM = {"TrainJob"}
"""Kinds that Kubernetes itself does not know; the validator beside the project holds their schemas."""


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def find(kind: str, name: str, path: Path) -> dict[str, Any]:
    (found,) = [each for each in documents(path) if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shell_script_parses_and_shellcheck_finds_nothing(script):
    subprocess.run(["bash", "-n", script], check=True)
    done = subprocess.run(
        [Path(sys.executable).parent / "shellcheck", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.name)
def test_manifest_fits_the_schemas_of_kubernetes_strictly(manifest):
    for document in documents(manifest):
        if document["kind"] not in CUSTOM:
            kubernetes_validate.validate(document, "1.37", strict=True)


def test_strict_schemas_refuse_an_unknown_field_and_a_wrong_type():
    for field, value in (("replica", 1), ("replicas", "one")):
        broken = find("Deployment", "mlflow", MANIFESTS[1])
        broken["spec"][field] = value
        with pytest.raises(kubernetes_validate.ValidationError, match=field if field == "replica" else "one"):
            kubernetes_validate.validate(broken, "1.37", strict=True)


@pytest.mark.slow
def test_trainjob_fits_the_schema_of_kubeflow_trainer(tmp_path, capsys):
    validator = ROOT.parent / "shared" / "kubernetes" / "validate.py"
    if not validator.is_file():
        pytest.skip(f"the schemas of Kubeflow Trainer are not here: {validator}")
    whole, broken = MANIFESTS[0], tmp_path / "broken.yaml"
    broken.write_text(whole.read_text(encoding="utf-8").replace("numNodes: 2", "numNode: 2"))
    assert runpy.run_path(str(validator))["main"]([str(whole), str(broken)]) == 1
    said = capsys.readouterr().out
    assert f"{whole}: ok: ('trainer.kubeflow.org/v1alpha1', 'TrainJob')" in said
    assert f"{whole}: spec" not in said
    assert f"{broken}: spec/trainer: " in said


def test_trainjob_saves_within_its_grace_period_and_writes_where_it_may():
    job = find("TrainJob", "digits", MANIFESTS[0])["spec"]
    (patch,) = job["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = patch["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environ = {each["name"]: each["value"] for each in job["trainer"]["env"]}
    assert int(environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    assert (patch["name"], container["name"]) == ("node", "node"), "what Trainer's torch-distributed calls them"
    assert not [name for name in environ if name.startswith("PET_")], "Trainer's own"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    claim = find("PersistentVolumeClaim", "attention-zoo", MANIFESTS[0])
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    work = next(volume for volume in pod["volumes"] if volume["name"] == "work")
    assert work["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert job["trainer"]["numProcPerNode"] == job["trainer"]["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    words = job["trainer"]["args"]
    assert words[words.index("--output_dir") + 1].startswith("/training/")
    assert words[words.index("--resume") + 1] == "auto"


def test_sbatch_stops_its_ranks_within_what_the_time_limit_leaves():
    script = (DEPLOY / "slurm.sbatch").read_text(encoding="utf-8")
    (notice,) = re.findall(r"^#SBATCH --signal=B:USR1@(\d+)$", script, re.MULTILINE)
    (patience,) = re.findall(r"^export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=(\d+)$", script, re.MULTILINE)
    assert int(patience) < int(notice)
    assert "\n#SBATCH --requeue\n" in script


def test_trainings_find_the_server_under_the_name_that_it_answers_to():
    server = find("Deployment", "mlflow", MANIFESTS[1])["spec"]["template"]["spec"]
    words = dict(word.removeprefix("--").split("=", 1) for word in server["containers"][0]["args"])
    hosts = words["allowed-hosts"].split(",")
    uri = next(each["value"] for each in find("TrainJob", "digits", MANIFESTS[0])["spec"]["trainer"]["env"])
    service = find("Service", "mlflow", MANIFESTS[1])
    assert uri == f"http://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    for host in ("mlflow:5000", "mlflow.team.svc:5000", "mlflow.team.svc.cluster.local:5000", "localhost:5000"):
        assert is_allowed_host_header(hosts, host), host
    for host in ("other:5000", "mlflow", "mlflow.evil.example:5000", "10.0.0.1:5000"):
        assert not is_allowed_host_header(hosts, host), host


def test_both_ways_to_run_the_server_run_the_same_server():
    pod = find("Deployment", "mlflow", MANIFESTS[1])["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    service = read_compose({"POSTGRES_PASSWORD": "secret"})["mlflow"]
    assert container["command"] == service["entrypoint"]
    assert [word for word in container["args"] if "hosts" not in word] == [
        word for word in service["command"] if "hosts" not in word
    ]
    plain = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    assert plain | {"PGPASSWORD": "secret"} == service["environment"]
    assert pod["enableServiceLinks"] is False, "else MLFLOW_PORT=tcp://... of the Service is read as the server's port"


def test_no_file_holds_a_password():
    with pytest.raises(KeyError, match=r"POSTGRES_PASSWORD: set it in deploy/mlflow/\.env or in the environment"):
        read_compose({})
    with pytest.raises(KeyError, match="POSTGRES_PASSWORD"):
        read_compose({"POSTGRES_PASSWORD": ""})
    for kind, name in (("StatefulSet", "postgres"), ("Deployment", "mlflow")):
        (container,) = find(kind, name, MANIFESTS[1])["spec"]["template"]["spec"]["containers"]
        (secret,) = [each for each in container["env"] if "PASSWORD" in each["name"]]
        assert secret["valueFrom"]["secretKeyRef"] == {"name": "mlflow-database", "key": "password"}
    assert not [each for each in documents(MANIFESTS[1]) if each["kind"] == "Secret"]
