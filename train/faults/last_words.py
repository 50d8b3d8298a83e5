"""What one rank says for all when a run ends before its time, and writes into its MLflow run."""

import sys
from collections.abc import Callable
from contextlib import suppress

from tqdm import tqdm

from train.config import TrackingConfig
from train.faults.cause import Cause
from train.faults.marking import is_reachable, mark_ended


class LastWords:
    """The words, once there is something to say of a run.

    Args:
        tracking: Where the MLflow run is.
        same_machine: Whether the main process runs on this machine, and so a store that is a file lies here.
        where: Which ranks are on which machine, for a cause that names none; "" for a single machine.
        first_here: Whether this is another machine's first rank, which repeats what the main machine tells.

    Attributes:
        run_id: The MLflow run; "" before there is one.
        advice: Says what is left of the run and how to go on; called when it is needed.
    """

    def __init__(
        self, tracking: TrackingConfig, *, same_machine: bool, where: str = "", first_here: bool = False
    ) -> None:
        self._tracking, self._same_machine = tracking, same_machine
        self._where, self._first_here = where, first_here
        self.run_id = ""
        self.advice: Callable[[], str] = lambda: ""

    def speak(self, cause: Cause) -> None:
        """Tell the cause in one line on standard error, then end the MLflow run with it."""
        message, advice = self._locate(cause), self.advice()
        tell(f"{_word(cause)}: {message}{'; ' * bool(advice)}{advice}")
        if not self.run_id:
            return
        if not is_reachable(self._tracking.uri, same_machine=self._same_machine):
            tell(
                f"the MLflow run {self.run_id} is not marked: its store is a file on the main process's machine; the "
                "next --resume there marks it"
            )
            return
        mark_ended(self._tracking.uri, self.run_id, "KILLED" if cause.kind == "stopped" else "FAILED", message)

    def echo(self, cause: Cause) -> None:
        """Repeat on another machine what the speaker tells on its own, once for the machine: each has an output."""
        if self._first_here:
            tell(f"{_word(cause)}: {self._locate(cause)}")

    def _locate(self, cause: Cause) -> str:
        named = not self._where or cause.kind in ("gone", "silent", "hung")
        return cause.message if named else f"{cause.message}; {self._where}"


def _word(cause: Cause) -> str:
    return "stopped" if cause.kind == "stopped" else "error"


def tell(text: str) -> None:
    """Write to standard error, above a progress bar; where nobody can read it any more, as in a closed terminal, go on.

    What is left to do, to mark the run and to leave, must not depend on it.
    """
    with suppress(OSError, ValueError):  # nowhere is left to say that nothing can be said
        tqdm.write(text, file=sys.stderr)
        sys.stderr.flush()
