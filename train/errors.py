"""What can go wrong in training, and the exit status each kind ends with.

TrainError (a ValueError: what the user gave does not fit, exit 2)
├── ConfigError        a recipe or a field of it: unknown, out of range, contradictory
├── DataError          a folder, file or class map that cannot be trained on
├── WorldSizeError     processes asked for and processes found differ
├── TrackingError      a tracking server or store that cannot be used
├── CheckpointError    a checkpoint that is damaged, foreign or absent
└── PublishError       a bundle, version or alias that cannot be published
CheckFailed (a check looked and found a fault, exit 3)
├── ReplicaMismatch    ranks that do not hold the same model
├── RanksDisagree      ranks that differ in what surrounds the model, or are alike where they must differ
└── NonFiniteLoss      a loss that is NaN or infinite
RunEnded               what ended the run happened on another rank, and has been told; its exit status
Stopped (no Exception) a signal asks this process to leave
"""

from zoo.errors import AuditError, ZooError


class TrainError(ValueError):
    """Something the user gave does not fit; the message says what, and the way out."""


class ConfigError(TrainError):
    """A recipe or one of its fields is unknown, out of range or contradicts another."""


class DataError(TrainError):
    """The data cannot be trained on as it is."""


class WorldSizeError(TrainError):
    """The processes that were asked for are not the processes that are."""


class TrackingError(TrainError):
    """The tracking store cannot be reached or refuses the run."""


class CheckpointError(TrainError):
    """A checkpoint is damaged, absent or belongs to another run."""


class PublishError(TrainError):
    """A model could not be published; the registry is as it was."""


class CheckFailed(Exception):  # noqa: N818  (the family of ReplicaMismatch, and named as it is)
    """A check found a fault in the run itself."""


class ReplicaMismatch(CheckFailed):
    """Ranks hold different parameters or buffers."""


class RanksDisagree(CheckFailed):
    """Ranks differ in config, code, versions, data or checkpoint, or are alike where they must differ."""


class NonFiniteLoss(CheckFailed):
    """The loss is NaN or infinite, on this rank or on another."""


class RunEnded(Exception):  # noqa: N818  (not an error of this rank)
    """The run ended by what happened on another rank; the message is the first cause's.

    Args:
        message: The first cause.
        status: The exit status of all ranks.
        killed: Whether it was a signal.
    """

    def __init__(self, message: str, *, status: int = 1, killed: bool = False) -> None:
        super().__init__(message)
        self.status, self.killed = status, killed


class Stopped(BaseException):
    """This process was asked to leave; like KeyboardInterrupt it is no Exception.

    Args:
        reason: Who asked, and what was saved.
        agreed: Whether all ranks leave together, after a step.
    """

    def __init__(self, reason: str = "stopped", *, agreed: bool = False) -> None:
        super().__init__(reason)
        self.agreed = agreed


# The first row that fits decides, so a kind stands above the kind that it is a child of.
_STATUSES: tuple[tuple[type[BaseException], int], ...] = (
    (AuditError, 3),
    (CheckFailed, 3),
    (ZooError, 2),
    (TrainError, 2),
)


def exit_status(error: BaseException) -> int:
    """Return the process exit status an error ends with: 2 the user's mistake, 3 a fault found by a check, else 1."""
    if isinstance(error, RunEnded):
        return error.status
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), 1)
