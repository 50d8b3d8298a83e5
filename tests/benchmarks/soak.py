"""Kill a training through the real `accelerate launch` for some minutes, and hold each end against a run never stopped.

    PYTHONPATH=. python tests/benchmarks/soak.py [--minutes 10] [--seed 0] [--ranks 1,2,3,4]

Each round draws a number of ranks and starts a run anew; it is killed, all ranks or one, by SIGKILL, by SIGTERM to the
launcher or by Ctrl-C to the whole group, at a random moment, and goes on by `--resume auto`, until it is complete. It
prints a line for each round: the kills, and whether weights, optimizer, random states, images, rates and metrics are
the same. At the end a count of each kind of kill.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from tests.end_to_end.chain import Chain, begin, free_port, make_store
from tests.train.tiny import write_images

ROOT = Path(__file__).parent.parent.parent
WAYS = ("SIGKILL to all", "SIGKILL to one rank", "SIGTERM to the launcher", "Ctrl-C to the group")
_MOST_KILLS = 5
_DEADLINE_S = 300


def launch(chain: Chain) -> "subprocess.Popen[bytes]":
    """Start all ranks as a user does, each of which notes its steps."""
    ranks = ["--num_processes", str(chain.world_size), "--main_process_port", str(free_port())]
    config = str(ROOT / "accelerate_config.yaml")
    command = ["accelerate", "launch", "--config_file", config, *ranks, "-m", "tests.benchmarks.noted_rank"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    with (chain.folder / "rank0.log").open("ab") as log:
        return subprocess.Popen(
            [*command, "recipe.yaml", "--resume", "auto"],
            cwd=chain.folder,
            env=environ,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def find_ranks(launcher: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    """Return the processes below the launcher; alone, it trains as its only child."""
    try:
        return psutil.Process(launcher.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def strike(launcher: "subprocess.Popen[bytes]", way: str, draws: random.Random) -> None:
    """Kill a run in one of the ways."""
    ranks = find_ranks(launcher)
    if way == "SIGTERM to the launcher":
        launcher.terminate()
    elif way == "Ctrl-C to the group":
        for process in ranks:
            send(process, signal.SIGINT)
        launcher.send_signal(signal.SIGINT)
    else:
        for process in [draws.choice(ranks)] if way == "SIGKILL to one rank" and ranks else ranks:
            send(process, signal.SIGKILL)


def send(process: psutil.Process, number: int) -> None:
    """Send a signal to a process that may have ended."""
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def wait(launcher: "subprocess.Popen[bytes]", chain: Chain) -> int:
    """Wait for the launcher's end; what then still stands is an orphan, and a fault."""
    ranks = find_ranks(launcher)
    try:
        status = launcher.wait(_DEADLINE_S)
    except subprocess.TimeoutExpired:
        os.killpg(launcher.pid, signal.SIGKILL)
        raise AssertionError(f"{chain.describe()}: hangs\n{chain.printed()}") from None
    _, orphans = psutil.wait_procs(ranks, timeout=40)
    for orphan in orphans:
        send(orphan, signal.SIGKILL)
    assert not orphans, f"{chain.describe()}: {orphans} outlived the launcher\n{chain.printed()}"
    return status


def play_round(chain: Chain, straight: Chain, seconds: float, draws: random.Random) -> tuple[list[str], list[str]]:
    """Kill a run again and again, then let it end; return the kills and the differences."""
    kills: list[str] = []
    for _ in range(_MOST_KILLS):
        launcher, way, moment = launch(chain), draws.choice(WAYS), draws.uniform(0.2, 1.0) * seconds
        try:
            launcher.wait(moment)
        except subprocess.TimeoutExpired:
            strike(launcher, way, draws)
        if wait(launcher, chain) == 0:
            return kills, chain.differences(straight)
        kills.append(f"{way} at {moment:.1f} s")
        chain.early += not any((chain.folder / "runs").glob("*/*/checkpoints/step-*"))
    status = wait(launch(chain), chain)
    assert status == 0, f"{chain.describe()}: ended with {status}\n{chain.printed()}"
    return kills, chain.differences(straight)


def main() -> int:
    """Play rounds until the time is over; return 1 if any run ended otherwise than one that was never stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", default="1,2,3,4")
    given = parser.parse_args()
    draws, end = random.Random(given.seed), time.monotonic() + 60 * given.minutes
    bad, ways = 0, Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        images, store = write_images(root / "images", train=11), make_store(root / "empty.db")
        straight: dict[int, tuple[Chain, float]] = {}
        played = 0
        while time.monotonic() < end:
            world_size, played = int(draws.choice(given.ranks.split(","))), played + 1
            if world_size not in straight:
                chain, start = begin(root / f"straight{world_size}", world_size, images, store), time.monotonic()
                assert wait(launch(chain), chain) == 0, chain.printed()
                straight[world_size] = chain, time.monotonic() - start
            chain = begin(root / f"round{played}", world_size, images, store)
            kills, differences = play_round(chain, *straight[world_size], draws)
            ways.update(kill.partition(" at ")[0] for kill in kills)
            bad += bool(differences)
            told = "identical" if not differences else f"DIFFERENT: {'; '.join(differences)}"
            print(f"round {played}: {world_size} ranks, killed by [{'; '.join(kills)}]: {told}", flush=True)
    print(f"{played} rounds, {sum(ways.values())} kills {dict(ways)}, {bad} ended otherwise; seed {given.seed}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
