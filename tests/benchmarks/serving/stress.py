"""The endpoint at its limits: 80 % of its capacity, ten times its capacity, and a new version every five seconds.

    PYTHONPATH=. python tests/benchmarks/serving/stress.py [--only steady,overload,reload] [--seconds 60]

Capacity is what the same load generator gets with 32 waiting clients, measured before and after each part.
steady    an open loop at 80 % of it, with random gaps and with even ones: p99 as a multiple of p50.
overload  an open loop at ten times it: rate of 200s beside the capacity, answers by status, memory.
reload    an open loop at half of it while the alias moves to the other of two versions every five seconds: answers by
          status, swaps.
"""

import argparse
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from mlflow.tracking import MlflowClient

from tests.benchmarks.serving import subject
from tests.benchmarks.serving.compare import send
from tests.benchmarks.serving.servers import Server, our_server
from zoo.card import EngineChoice

Summary = dict[str, object]


def find_capacity(server: Server, seconds: float = 8) -> float:
    """Return the answers a second that 32 waiting clients get."""
    return float(str(send(server, "--clients", "32", "--seconds", str(seconds))["rate"]))


def watch(server: Server, work: Callable[[], Summary]) -> Summary:
    """Run `work` and add the server's memory, looked at each second: at the start, the most, at the end."""
    seen, done = [server.rss_mb()], threading.Event()

    def look() -> None:
        while not done.wait(1):
            seen.append(server.rss_mb())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        summary = work()
    finally:
        done.set()
        thread.join()
    quarter = seen[len(seen) // 4]
    return {
        **summary,
        "rss_mb": f"start {seen[0]:.0f}, after a quarter {quarter:.0f}, most {max(seen):.0f}, "
        f"end {server.rss_mb():.0f}",
    }


def run_part(name: str, server: Server, times: float, seconds: float, *flags: str) -> Summary:
    """Send `times` the capacity for `seconds`, between two looks at the capacity."""
    before = find_capacity(server)
    asked = times * before
    summary = watch(server, lambda: send(server, "--rate", f"{asked:.1f}", "--seconds", str(seconds), *flags))
    after = find_capacity(server)
    capacity = (before + after) / 2
    goodput = float(str(summary["rate"]))
    ratio = float(str(summary["p99_ms"])) / float(str(summary["p50_ms"]))
    print(f"\n{name}: capacity {before:.1f} before, {after:.1f} after; asked {asked:.1f}/s for {seconds:.0f} s")
    print(f"  200s      {goodput:.1f}/s, {goodput / capacity:.2f} of the capacity; p99 is {ratio:.2f} times p50")
    for key, value in summary.items():
        print(f"  {key:14}{value}")
    return summary


def reload(folder: Path, bundles: list[Path], seconds: float) -> None:
    """Move the alias every five seconds under load."""
    uris = [subject.register(bundle, folder) for bundle in bundles]
    store, client = uris[0][1], MlflowClient()
    client.set_registered_model_alias(subject.NAME, "champion", "1")
    server = our_server(f"models:/{subject.NAME}@champion", "--poll-interval-s", "1", name="reloading", folder=folder)
    server.environment = {"MLFLOW_TRACKING_URI": store}
    done = threading.Event()
    moves = 0

    def move() -> None:
        nonlocal moves
        while not done.wait(5):
            moves += 1
            client.set_registered_model_alias(subject.NAME, "champion", str(1 + moves % 2))

    with server:
        mover = threading.Thread(target=move)
        capacity = find_capacity(server)
        mover.start()
        try:
            summary = watch(server, lambda: send(server, "--rate", f"{capacity / 2:.1f}", "--seconds", str(seconds)))
        finally:
            done.set()
            mover.join()
        swaps = [line for line in server.get("/metrics").splitlines() if line.startswith("serve_reloads_total")]
    print(f"\nreload: {moves} moves of the alias at {capacity / 2:.1f} requests/s")
    for key, value in [*summary.items(), ("swaps", swaps)]:
        print(f"  {key:14}{value}")


def main() -> None:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="steady,overload,reload")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--engine", choices=("onnx", "eager"), default="onnx")
    given = parser.parse_args()
    parts = given.only.split(",")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        choice = EngineChoice(name=given.engine)
        bundles = [subject.write_bundle(folder / f"bundle-{seed}", choice, seed=seed) for seed in (0, 1)]
        if set(parts) & {"steady", "overload"}:
            with our_server(str(bundles[0]), folder=folder) as server:
                print(f"ready after {server.ready_s:.1f} s, {server.rss_mb():.0f} MB")
                send(server, "--clients", "8", "--seconds", "3")
                if "steady" in parts:
                    run_part("steady, random gaps", server, 0.8, given.seconds)
                    run_part("steady, even gaps", server, 0.8, given.seconds, "--even")
                if "overload" in parts:
                    run_part("overload", server, 10, given.seconds)
        if "reload" in parts:
            reload(folder, bundles, given.seconds)


if __name__ == "__main__":
    main()
