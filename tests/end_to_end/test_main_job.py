"""The whole line: train on two ranks, look at the run, serve the version, ask it over HTTP."""

import base64
import json
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import zoo
from train.config import DataConfig
from train.data import read_split

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from mlflow import MlflowClient

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning"),  # of MLflow's own queries
]


@pytest.fixture(scope="module")
def client(main_job: Any) -> MlflowClient:
    return MlflowClient(f"sqlite:///{main_job.folder}/mlflow.db")


@pytest.fixture(scope="module")
def run(client: MlflowClient) -> Any:
    experiment = client.get_experiment_by_name("attention-zoo")
    runs = client.search_runs([experiment.experiment_id])
    assert len(runs) == 1, "two ranks, one run"
    return runs[0]


@pytest.fixture(scope="module")
def endpoint(main_job: Any, serve: Any) -> Iterator[str]:
    with serve(main_job.folder, sys.executable, "-m", "serve") as url:
        yield url


def test_the_output_tells_ranks_checks_result_version_and_what_comes_next(main_job: Any) -> None:
    for line in (
        r"ranks     2 ranks, backend gloo: rank 0 on cpu, rank 1 on cpu",
        r"audit     \d+ parameters, \d+ trainable, 0 findings",
        r"replicas  before wrap: 2 ranks are equal, tensors=\d+ bytes=\d+ ms=[\d.]+",
        r"result    top-1 9\d\.\d\d% on 360 validation images",
        r"registry  digits version 1, @champion -> version 1",
        r"look at it  .*mlflow ui",
        r"serve it    .*-m serve models:/digits@champion",
    ):
        assert len(re.findall(f"^{line}", main_job.out, re.MULTILINE)) == 1, f"{line}\n{main_job.out}"


def test_the_held_out_digits_are_read(run: Any) -> None:
    assert run.data.metrics["val/top1"] >= 0.97


def test_the_run_holds_config_metrics_by_step_and_the_last_checkpoint(client: MlflowClient, run: Any) -> None:
    assert run.info.status == "FINISHED"
    assert run.data.params["model.attention"] == "parameter"
    assert run.data.params["model.backbone"] == "vit_tiny_patch16_224"
    for name in ("train/loss", "train/lr", "val/loss", "val/top1", "val/top5", "perf/images_per_s"):
        steps = [metric.step for metric in client.get_metric_history(run.info.run_id, name)]
        assert len(steps) > 5
        assert steps == sorted(set(steps))
    saved = client.list_artifacts(run.info.run_id, "checkpoints")
    assert len(saved) == 1
    assert {Path(file.path).name for file in client.list_artifacts(run.info.run_id, saved[0].path)} == {
        "model.safetensors",
        "optimizer.safetensors",
        "rng.safetensors",
        "state.json",
    }


def test_the_registered_version_names_its_run_and_score(client: MlflowClient, run: Any) -> None:
    version = client.get_model_version_by_alias("digits", "champion")
    assert version.run_id == run.info.run_id
    assert float(version.tags["val/top1"]) == run.data.metrics["val/top1"]
    assert version.tags["val_fingerprint"] == run.data.tags["val_fingerprint"]


def test_the_checkpoint_knows_its_run(main_job: Any, run: Any) -> None:
    states = list(main_job.folder.glob("runs/digits/*/checkpoints/step-*/state.json"))
    assert states
    assert {json.loads(state.read_text())["run_id"] for state in states} == {run.info.run_id}


def test_nothing_written_is_a_pickle(main_job: Any) -> None:
    written = [path for path in main_job.folder.rglob("*") if path.is_file()]
    assert not [path for path in written if path.suffix in (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt", ".npy")]


def test_the_bundle_is_the_variant_that_was_asked_for(main_job: Any) -> None:
    bundle = main_job.folder / "runs/digits/latest/bundle"
    model, card = zoo.load_bundle(bundle)
    assert card.attention == "parameter"
    assert model.state_dict()["blocks.0.attn.qkv.to_q"].shape == (64, 64)


def test_an_image_by_http_gets_its_class(main_job: Any, endpoint: str) -> None:
    image = (main_job.folder / "runs/digits/examples/3.png").read_bytes()
    answer = httpx.post(f"{endpoint}/invocations", content=image, headers={"content-type": "image/png"})
    (prediction,) = answer.json()["predictions"]
    assert prediction["label"] == "3"
    assert 0.5 < prediction["probability"] <= 1
    assert (answer.headers["x-model-name"], answer.headers["x-model-version"]) == ("digits", "1")


def test_the_validation_set_by_http_scores_what_was_logged(run: Any, endpoint: str) -> None:
    split = read_split(DataConfig(root="builtin:digits"))
    labels: list[str] = []
    for start in range(0, len(split.val), 30):
        some = range(start, min(start + 30, len(split.val)))
        images = [{"image": base64.b64encode(split.val.read(index)).decode()} for index in some]
        answer = httpx.post(f"{endpoint}/invocations", json={"instances": images}, timeout=60)
        labels += [prediction["label"] for prediction in answer.json()["predictions"]]
    right = sum(label == split.class_names[wanted] for label, wanted in zip(labels, split.val.labels, strict=True))
    assert right / len(split.val) == run.data.metrics["val/top1"]


def test_mlflows_own_server_gives_the_same_numbers(main_job: Any, endpoint: str, serve: Any) -> None:
    image = base64.b64encode((main_job.folder / "runs/digits/examples/7.png").read_bytes()).decode()
    body = {"dataframe_split": {"columns": ["image"], "data": [[image]]}}
    ours = httpx.post(f"{endpoint}/invocations", json=body).json()
    command = ("mlflow", "models", "serve", "-m", "models:/digits@champion", "--env-manager", "local")
    with serve(main_job.folder, *command, ready="/ping") as url:
        theirs = httpx.post(f"{url}/invocations", json=body, timeout=60).json()
    assert theirs == ours
