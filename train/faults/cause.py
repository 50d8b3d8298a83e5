"""Why a run ends before its time: what is told, tagged on the MLflow run, and passed from rank to rank."""

from typing import Literal

import torch.distributed as dist
from pydantic import BaseModel, ConfigDict

from train.errors import Stopped, exit_status
from train.ranks import is_shared

_WORDS_OF_PEERS = ("gloo", "NCCL", "Connection closed by peer", "Connection reset", "Broken pipe", "Socket")

TOLD = "told"  # a note on an error that has been told, on one rank for all


class Cause(BaseModel):
    """The first thing that went wrong.

    Attributes:
        kind: "raised" (an error on a rank), "gone" (its process ended without a word), "silent" (no sign of life from
            it), "hung" (it does not get on) or "stopped" (a signal, and no step ended in time).
        ranks: Where.
        message: One line for the user.
        status: The exit status of all ranks.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    kind: Literal["raised", "gone", "silent", "hung", "stopped"]
    ranks: tuple[int, ...]
    message: str
    status: int = 1

    @property
    def gone(self) -> tuple[int, ...]:
        """Ranks that cannot speak any more."""
        return self.ranks if self.kind in ("gone", "silent") else ()


def cause_of(error: BaseException, rank: int, world_size: int, place: str) -> Cause:
    """Return an error on this rank as a cause; one that is not raised on every rank alike tells which, and where.

    Args:
        error: What was raised.
        rank: Here.
        world_size: Ranks in all.
        place: What this rank was at.
    """
    if isinstance(error, Stopped):
        return Cause(kind="stopped", ranks=tuple(range(world_size)) if error.agreed else (rank,), message=str(error))
    where = "" if world_size == 1 or is_shared(error) else f"rank {rank}, {place}: "
    return Cause(kind="raised", ranks=(rank,), message=where + describe(error), status=exit_status(error))


def describe(error: BaseException) -> str:
    """Return what an error says, as text that any store takes; with its kind, where that is not one of ours."""
    try:
        text = str(error) or repr(error)
    except Exception as second:  # told all the same: some errors cannot be printed
        text = f"it cannot be printed ({type(second).__name__})"
    text = text.encode("utf-8", "backslashreplace").decode()  # a file's name may be no text
    return text if exit_status(error) != 1 else f"{type(error).__name__}: {text}"


def is_consequence(error: BaseException) -> bool:
    """Say whether an error looks like the loss of another rank, seen from here: a collective that broke off."""
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and any(word in str(error) for word in _WORDS_OF_PEERS)


def was_told(error: BaseException) -> bool:
    """Say whether an error has been told to the user already."""
    return TOLD in getattr(error, "__notes__", ())
