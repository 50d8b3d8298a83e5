"""How many CPU cores this process may use: what a container was given, not what the machine has."""

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def count_cores(cgroup: Path = _CGROUP) -> int:
    """Count the cores that the process may run on, or fewer where its container has a quota of CPU time.

    With more threads than the quota pays for, all of them are halted for the rest of each tenth of a second.

    Args:
        cgroup: Where a container sees its own control group, of version 2 or 1.

    Returns:
        1 or more; part of a core counts as one.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _read_quota(cgroup)
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def _read_quota(cgroup: Path) -> float | None:
    """Read the quota in cores; None where there is none."""
    try:
        limit, period = (cgroup / "cpu.max").read_text().split()  # "max 100000" or "150000 100000"
    except (OSError, ValueError):
        try:
            limit, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        except OSError:
            return None
    try:
        share = int(limit) / int(period)
    except (ValueError, ZeroDivisionError):
        return None
    return share if share > 0 else None  # version 1 says -1 for none
