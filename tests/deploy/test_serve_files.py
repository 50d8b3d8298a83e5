"""deploy/serve: manifests that fit their schemas, and the code: its settings, routes, port, metrics and way to end."""

import re
import runpy
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from prometheus_client.metrics import MetricWrapperBase

from serve.app import create_app
from serve.errors import STATUSES
from serve.models.uris import parse_uris
from serve.operations import draining
from serve.operations.gate import PROBES
from serve.operations.metrics import Metrics
from serve.settings import Settings

ROOT = Path(__file__).parent.parent.parent
KUBERNETES = ROOT / "deploy" / "serve" / "kubernetes.yaml"
KSERVE = ROOT / "deploy" / "serve" / "kserve.yaml"
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
OTHERS = {"MLFLOW_TRACKING_URI", "PROTOCOL"}
"""Variables that are not ours: MLflow's, and what KServe reads of a predictor."""


def documents(path: Path) -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in yaml.safe_load_all(path.read_text(encoding="utf-8"))}


def pod_of(path: Path) -> dict[str, Any]:
    found = documents(path)
    pod: dict[str, Any] = (
        found["InferenceService"]["spec"]["predictor"]
        if path == KSERVE
        else found["Deployment"]["spec"]["template"]["spec"]
    )
    return pod


def container_of(path: Path) -> dict[str, Any]:
    (container,) = pod_of(path)["containers"]
    return dict(container)


def environment(path: Path) -> dict[str, str]:
    """The variables of a replica; what the cluster fills in, as it would."""
    container, found = container_of(path), {}
    for each in container["env"]:
        if "value" in each:
            found[each["name"]] = each["value"]
        else:
            kind, _, resource = each["valueFrom"]["resourceFieldRef"]["resource"].partition(".")
            found[each["name"]] = container["resources"][kind][resource]
    return found


def read_settings(path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    for name, value in environment(path).items():
        monkeypatch.setenv(name, value)
    return Settings()


both = pytest.mark.parametrize("path", [KUBERNETES, KSERVE], ids=lambda path: path.name)


def test_manifests_fit_the_schemas_of_kubernetes_strictly():
    found = documents(KUBERNETES)
    assert {"Deployment", "Service", "HorizontalPodAutoscaler", "PodDisruptionBudget", "NetworkPolicy"} == set(found)
    for document in found.values():
        kubernetes_validate.validate(document, "1.37", strict=True)


@pytest.mark.parametrize(
    "kind", ["Deployment", "Service", "HorizontalPodAutoscaler", "PodDisruptionBudget", "NetworkPolicy"]
)
def test_strict_schemas_refuse_an_unknown_field(kind):
    broken = documents(KUBERNETES)[kind]
    broken["spec"]["selektor"] = 1
    with pytest.raises(kubernetes_validate.ValidationError, match="selektor"):
        kubernetes_validate.validate(broken, "1.37", strict=True)


@pytest.mark.slow
def test_inference_service_fits_the_schema_of_kserve(tmp_path, capsys):
    validator = ROOT.parent / "shared" / "kubernetes" / "validate.py"
    if not validator.is_file():
        pytest.skip(f"the schemas of KServe are not here: {validator}")
    broken = tmp_path / "broken.yaml"
    broken.write_text(KSERVE.read_text(encoding="utf-8").replace("minReplicas: 2", "minReplica: 2"))
    assert runpy.run_path(str(validator))["main"]([str(KSERVE), str(broken)]) == 1
    said = capsys.readouterr().out
    assert f"{KSERVE}: ok: ('serving.kserve.io/v1beta1', 'InferenceService')" in said
    assert f"{KSERVE}: spec" not in said
    assert f"{broken}: spec/predictor: " in said


@both
def test_every_variable_is_a_setting_with_a_value_that_it_takes(path, monkeypatch):
    given = environment(path)
    known = {f"SERVE_{name.upper()}" for name in Settings.model_fields}
    assert set(given) - known <= OTHERS
    settings = read_settings(path, monkeypatch)
    assert settings.threads == 2
    assert settings.log_format == "json"


@both
def test_probes_are_routes_that_ask_for_no_key(path):
    container = container_of(path)
    paths = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    routes = set(create_app(Settings()).openapi()["paths"])
    assert set(paths.values()) <= routes
    assert set(paths.values()) <= PROBES
    assert paths["startup"] == paths["readiness"]
    assert (paths["readiness"], paths["liveness"]) in [("/ready", "/health"), ("/v2/health/ready", "/v2/health/live")]


@both
def test_port_is_the_images(path):
    (port,) = container_of(path)["ports"]
    assert port["containerPort"] == Settings().port
    assert (
        DOCKERFILE.count(f"SERVE_PORT={port['containerPort']}")
        == DOCKERFILE.count(f"EXPOSE {port['containerPort']}")
        == 2
    )
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container_of(path)[probe]["httpGet"]["port"] in (port["name"], port["containerPort"])


@both
def test_a_replica_has_time_to_end_by_itself(path, monkeypatch):
    settings = read_settings(path, monkeypatch)
    readiness = container_of(path)["readinessProbe"]
    worst_s = settings.drain_grace_s + settings.shutdown_timeout_s + draining._EXIT_S
    assert worst_s < pod_of(path)["terminationGracePeriodSeconds"]
    assert settings.drain_grace_s >= readiness["periodSeconds"] * readiness["failureThreshold"]


@both
def test_a_replica_may_do_what_it_must_and_nothing_else(path):
    pod, container = pod_of(path), container_of(path)
    user = re.findall(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE)[-1]
    assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsGroup"]) == tuple(map(int, user))
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["enableServiceLinks"] is False
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    assert set(volumes) == set(mounts)
    assert "sizeLimit" in volumes["tmp"]["emptyDir"]
    assert mounts["tmp"]["mountPath"] == "/tmp"
    assert "    HOME=/tmp \\\n" in DOCKERFILE
    assert container["resources"]["requests"]["cpu"], "what the autoscaler's percents are of"


@both
def test_its_head_builds_the_image_that_it_starts(path):
    assert container_of(path)["image"] == "attention-zoo"
    assert "#   docker build -t attention-zoo .\n" in DOCKERFILE


def test_keys_are_a_secret_that_the_head_makes_and_no_file_holds(monkeypatch):
    text = KUBERNETES.read_text(encoding="utf-8")
    (secret,) = [volume["secret"] for volume in pod_of(KUBERNETES)["volumes"] if "secret" in volume]
    (mount,) = [each for each in container_of(KUBERNETES)["volumeMounts"] if each["name"] == "keys"]
    name, key = re.findall(r"^#   kubectl create secret generic (\S+) --from-literal=(\w+)=", text, re.MULTILINE)[0]
    assert secret["secretName"] == name
    assert read_settings(KUBERNETES, monkeypatch).api_keys_file == Path(mount["mountPath"], key)
    assert mount["readOnly"] is True
    assert "subPath" not in mount, "a mounted key would never change"
    assert pod_of(KUBERNETES)["securityContext"]["fsGroup"] == 10001
    assert secret["defaultMode"] & 0o007 == 0
    assert secret["defaultMode"] & 0o040, "readable for the group"


def test_objects_mean_the_same_pods():
    found = documents(KUBERNETES)
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert found["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert found["Service"]["spec"]["selector"] == labels
    assert found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    for spread in pod_of(KUBERNETES)["topologySpreadConstraints"]:
        assert spread["labelSelector"]["matchLabels"] == labels
    target = found["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", found["Deployment"]["metadata"]["name"])
    assert "replicas" not in found["Deployment"]["spec"], "the autoscaler's"
    assert (
        found["HorizontalPodAutoscaler"]["spec"]["minReplicas"] > found["PodDisruptionBudget"]["spec"]["maxUnavailable"]
    )
    (port,) = found["Service"]["spec"]["ports"]
    name = container_of(KUBERNETES)["ports"][0]["name"]
    assert port["targetPort"] == found["NetworkPolicy"]["spec"]["ingress"][0]["ports"][0]["port"] == name


@both
def test_registry_is_the_server_of_the_file_beside(path):
    mlflow = list(yaml.safe_load_all((ROOT / "deploy" / "mlflow" / "kubernetes.yaml").read_text(encoding="utf-8")))
    service = next(each for each in mlflow if (each["kind"], each["metadata"]["name"]) == ("Service", "mlflow"))
    port = service["spec"]["ports"][0]["port"]
    assert environment(path)["MLFLOW_TRACKING_URI"] == f"http://mlflow:{port}"
    to_mlflow = documents(KUBERNETES)["NetworkPolicy"]["spec"]["egress"][1]
    assert to_mlflow["to"][0]["podSelector"]["matchLabels"] == service["spec"]["selector"]
    assert to_mlflow["ports"] == [{"protocol": "TCP", "port": port}]


def test_kserve_asks_for_the_model_by_the_name_that_it_is_served_by(monkeypatch):
    service = documents(KSERVE)["InferenceService"]
    settings = read_settings(KSERVE, monkeypatch)
    (uri,) = parse_uris(settings.model_uri)
    assert uri.name == service["metadata"]["name"]
    assert service["spec"]["predictor"]["timeout"] > settings.request_timeout_s
    assert container_of(KSERVE)["name"] == "kserve-container", "the name by which KServe finds it"


def test_metrics_that_files_name_are_there():
    named = set(re.findall(r"\bserve_[a-z_]+", KUBERNETES.read_text(encoding="utf-8")))
    text = Metrics().render("")[0].decode()
    assert named
    for name in named:
        assert f"# TYPE {name} " in text


def families() -> dict[str, tuple[str, ...]]:
    """The labels of each series that the code has, by the name that Prometheus stores."""
    found = {}
    for metric in vars(Metrics()).values():
        if isinstance(metric, MetricWrapperBase):
            (described,) = metric.describe()
            suffix = {"counter": "_total", "histogram": "_bucket"}.get(described.type, "")
            found[described.name + suffix] = (*metric._labelnames, *(("le",) if suffix == "_bucket" else ()))
    return found


RULES = [
    rule
    for group in yaml.safe_load((ROOT / "deploy" / "serve" / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_alert_is_of_series_and_labels_that_are_there(rule):
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert rule["labels"]["severity"] in ("page", "ticket")
    series = re.findall(r"\b(serve_\w+)(?:\{(.*?)\})?", rule["expr"])
    assert series
    for name, selector in series:
        assert set(re.findall(r"(\w+)=~?\"", selector)) <= set(families()[name])
    grouped = {word for by in re.findall(r"by \((.*?)\)", rule["expr"]) for word in by.split(", ")}
    labels = {label for name, _ in series for label in families()[name]}
    assert grouped <= labels
    assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= (grouped or labels)


def test_alerts_see_the_statuses_outcomes_and_routes_that_there_are():
    text = (ROOT / "deploy" / "serve" / "alerts.yaml").read_text(encoding="utf-8")
    statuses = set(re.findall(r'status=~?"([\d|]+)"', text))
    known = {str(status) for status, _ in STATUSES.values()} | {"500"}
    assert {status for each in statuses for status in each.split("|")} <= known
    assert set(re.findall(r'outcome="(\w+)"', text)) <= {"swapped", "refused", "unreachable"}
    (pattern,) = set(re.findall(r'route=~"(.*?)"', text))
    routes = list(create_app(Settings()).openapi()["paths"])
    asked = [route for route in routes if re.fullmatch(pattern, route)]
    assert asked == [route for route in routes if route.endswith(("/invocations", "/infer"))]
    assert len(asked) == 4
