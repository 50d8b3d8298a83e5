"""The endpoint beside `mlflow models serve`, a bare LitServe app, and its own engine called in a loop.

    PYTHONPATH=. python tests/benchmarks/serving/compare.py [--engine onnx] [--rounds 3] [--lit PYTHON]

One model, the same JPEGs; the servers stand side by side and are asked in turn, round after round, so that other load
falls on all of them. Columns: CPU milliseconds of the server for each answer (all its processes; the load generator is
a process of its own and not counted), answers a second, median and 99th percentile of latency, answers that were no
200. Read the CPU column: rates and latencies share the cores with the load generator.
`engine` is the same predictor called in a loop with batches of the size that the endpoint formed (its own metrics say).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from tests.benchmarks.serving import subject
from tests.benchmarks.serving.photos import make_photos
from tests.benchmarks.serving.servers import ROOT, Server, lit_server, mlflow_server, our_server
from zoo.card import EngineChoice
from zoo.preprocess import preprocess

LOAD = str(Path(__file__).with_name("load.py"))
Row = dict[str, float]


def send(server: Server, *flags: str) -> dict[str, object]:
    """Run the load generator in a process of its own and return its summary."""
    command = [sys.executable, LOAD, "--url", server.url, "--form", server.form, "--json", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(ROOT)})
    summary: dict[str, object] = json.loads(done.stdout)
    return summary


def measure(server: Server, clients: int, seconds: float) -> Row:
    """Load one server and return its row."""
    before = server.cpu_s()
    summary = send(server, "--clients", str(clients), "--seconds", str(seconds))
    spent = server.cpu_s() - before
    statuses = summary["statuses"]
    assert isinstance(statuses, dict)
    good = statuses.get("200", 0)
    row = {key: float(str(summary[key])) for key in ("rate", "p50_ms", "p99_ms")}
    return {"cpu_ms": 1000 * spent / good, **row, "not_200": sum(statuses.values()) - good}


def measure_engine(bundle: Path, batch: int, seconds: float) -> Row:
    """Call the engine in a loop, in a process of its own; CPU milliseconds for each image."""
    code = (
        "import sys, time, pathlib; from tests.benchmarks.serving.compare import loop_engine;"
        "print(*loop_engine(pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))"
    )
    words = [sys.executable, "-c", code, str(bundle), str(batch), str(seconds)]
    environ = {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"}  # as the endpoint sets it for itself
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT, env=environ)
    cpu_ms, rate = map(float, done.stdout.split())
    return {"cpu_ms": cpu_ms, "rate": rate, "p50_ms": float("nan"), "p99_ms": float("nan"), "not_200": 0}


def loop_engine(bundle: Path, batch: int, seconds: float) -> tuple[float, float]:
    """Return CPU milliseconds for each image, and images a second."""
    from serve.predictor import Predictor

    predictor = Predictor.from_bundle(bundle)
    images = np.stack([preprocess(photo, predictor.card.preprocessing) for photo in make_photos(batch)])
    for _ in range(3):
        predictor.predict(images)
    count, cpu, start = 0, time.process_time(), time.perf_counter()
    while time.perf_counter() - start < seconds:
        predictor.predict(images)
        count += batch
    return 1000 * (time.process_time() - cpu) / count, count / (time.perf_counter() - start)


def batches(server: Server) -> tuple[float, float]:
    """Return how many batches and images the endpoint has computed so far."""
    for family in text_string_to_metric_families(server.get("/metrics")):
        if family.name == "serve_batch_images":
            samples = {sample.name: sample.value for sample in family.samples}
            return samples["serve_batch_images_count"], samples["serve_batch_images_sum"]
    raise RuntimeError("the endpoint's metrics hold no serve_batch_images")


def compare(servers: list[Server], bundle: Path, clients: Iterable[int], rounds: int, seconds: float) -> None:
    """Measure all in turn, and print the medians over the rounds."""
    rows: dict[tuple[int, str], list[Row]] = defaultdict(list)
    for _ in range(rounds):
        for count in clients:
            for server in servers:
                before = batches(server) if server is servers[0] else (0.0, 0.0)
                rows[count, server.name].append(measure(server, count, seconds))
                if server is servers[0]:
                    made, images = (after - old for after, old in zip(batches(server), before, strict=True))
                    formed = images / made
                    size = max(1, round(formed))
            rows[count, "engine"].append({**measure_engine(bundle, size, seconds / 2), "batch": size})
            rows[count, servers[0].name][-1]["batch"] = formed
    print(
        f"{'clients':>8} {'server':16} {'CPU ms':>8} {'of ours':>8} {'rate/s':>8} {'p50 ms':>8} {'p99 ms':>8} "
        f"{'not 200':>8} {'batch':>6}"
    )
    for (count, name), many in sorted(rows.items(), key=lambda item: item[0][0]):
        middle = {key: median(row[key] for row in many) for key in many[0]}
        ours = median(row["cpu_ms"] for row in rows[count, servers[0].name])
        print(
            f"{count:>8} {name:16} {middle['cpu_ms']:>8.1f} {middle['cpu_ms'] / ours:>8.2f} {middle['rate']:>8.1f} "
            f"{middle['p50_ms']:>8.0f} {middle['p99_ms']:>8.0f} {middle['not_200']:>8.0f} "
            f"{middle.get('batch', 0):>6.1f}"
        )


def main() -> None:
    """Compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("onnx", "eager"), default="onnx")
    parser.add_argument("--clients", default="1,8,32,128")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--lit", help="an interpreter that has LitServe beside this project's packages")
    parser.add_argument("--no-mlflow", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as running:
        folder = Path(name)
        bundle = subject.write_bundle(folder / "bundle", EngineChoice(name=given.engine))
        servers = [our_server(str(bundle), "--max-queue", "512", folder=folder)]
        if not given.no_mlflow:
            servers.append(mlflow_server(*subject.register(bundle, folder), folder))
        if given.lit:
            servers.append(lit_server(given.lit, bundle, 8, folder))
        for server in servers:
            running.enter_context(server)
            print(f"{server.name:16} ready after {server.ready_s:.1f} s, {server.rss_mb():.0f} MB")
            measure(server, 8, 2)  # warm
        compare(servers, bundle, [int(count) for count in given.clients.split(",")], given.rounds, given.seconds)


if __name__ == "__main__":
    main()
