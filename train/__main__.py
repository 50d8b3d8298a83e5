"""`accelerate launch --config_file accelerate_config.yaml -m train [RECIPE] [--section.field VALUE ...]`."""

import os
import sys
import time
import traceback

os.environ.setdefault(
    "TORCH_CPP_LOG_LEVEL", "ERROR"
)  # read once, with torch: else C++ frames stand above a lost rank's line

from train.build import build_accelerator
from train.errors import Stopped, exit_status
from train.faults import stop
from train.faults.cause import was_told
from train.job import run_job
from train.launching.interface import choose_interface
from train.launching.meeting import meeting
from train.load import parse_command_line
from train.log import rank_of_environment, set_up_logging
from train.ranks import check_devices

_PATIENCE_S = 10.0


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status: 0 done, 2 the user's mistake, 3 a check's fault, 1 anything else."""
    set_up_logging()
    with stop.listening():
        try:
            return _run(sys.argv[1:] if argv is None else argv)
        except Stopped:  # also while a mistake waits to be told
            return 1


def _run(argv: list[str]) -> int:
    try:
        with meeting(os.environ) as patience:
            invocation = parse_command_line(argv)
            patience.timeout_s = invocation.config.watch.timeout_s
            check_devices(os.environ)
            choose_interface(os.environ)
        accelerator = build_accelerator(invocation.config.loop, timeout_s=invocation.config.watch.timeout_s)
        run_job(invocation.config, accelerator, dry_run=invocation.dry_run)
    except Exception as error:
        status = exit_status(error)
        if not was_told(error):
            _tell(error, status)
        return status
    return 0


def _tell(error: Exception, status: int) -> None:
    """Write a mistake in one line, from each machine's first rank; a fault of ours with its traceback, from any.

    This is for what happens before the ranks watch one another. All raise a mistake together. The first says it and
    leaves, whereupon the launcher ends the others of its machine; a rank that is still there after a while was alone
    with it, and speaks for itself.
    """
    rank = rank_of_environment()
    if status == 1:
        traceback.print_exception(error)
        return
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_PATIENCE_S)
    print(f"{'' if rank == 0 else f'rank {rank}: '}error: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    _status = main()
    if _status:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_status)  # a group of ranks that is still up would abort an interpreter that takes itself apart
