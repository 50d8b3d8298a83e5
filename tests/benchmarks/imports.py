"""Time `import zoo`, bare and with all its names, against `import timm`: `python tests/benchmarks/imports.py`.

The three take turns in fresh processes, so that a change of the machine's load meets them alike; the figures are the
median seconds of user and system time, and the median of the ratios of neighbours.
"""

import argparse
import resource
import statistics
import subprocess
import sys

FORMS = {
    "import timm": "import timm",
    "import zoo": "import zoo",
    "every public name of zoo": "import zoo\nfor name in zoo.__all__: getattr(zoo, name)",
}


def main() -> None:
    """Print a row for each form."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    times: dict[str, list[float]] = {name: [] for name in FORMS}
    for _ in range(rounds + 1):
        for name, code in FORMS.items():
            times[name].append(measure(code))
    warm = {name: seen[1:] for name, seen in times.items()}  # the first round fills the file cache
    for name, seen in warm.items():
        ratio = statistics.median(ours / timms for ours, timms in zip(seen, warm["import timm"], strict=True))
        print(f"{name:<26} {statistics.median(seen):6.2f} s  {ratio:.3f}")


def measure(code: str) -> float:
    """Return the processor seconds that a fresh process spends on `code`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
