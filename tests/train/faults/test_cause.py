import pickle
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed import DistBackendError, DistNetworkError

from train.errors import ConfigError, NonFiniteLoss, RunEnded, Stopped, exit_status
from train.faults.cause import TOLD, Cause, cause_of, describe, is_consequence, was_told
from train.ranks import together


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise KeyError("no text")


def test_error_of_one_rank_tells_which_and_where():
    cause = cause_of(ValueError("boom"), 1, 2, "step 7: forward")
    assert (cause.kind, cause.ranks, cause.status) == ("raised", (1,), 1)
    assert cause.message == "rank 1, step 7: forward: ValueError: boom"


def test_alone_there_is_no_rank_to_tell():
    assert cause_of(ConfigError("steps is 0"), 0, 1, "the start").message == "steps is 0"


def test_error_that_all_ranks_raise_is_not_one_ranks(monkeypatch):
    from train import ranks

    monkeypatch.setattr(ranks, "gather_json", lambda mine, _accelerator: [mine, mine])
    with pytest.raises(ConfigError) as caught, together(SimpleNamespace(num_processes=2), "planting"):
        raise ConfigError("steps is 0")
    assert cause_of(caught.value, 1, 2, "planting, done here").message == "steps is 0"


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ConfigError("steps is 0"), 2, "steps is 0"),
        (NonFiniteLoss("step 3: the loss is nan"), 3, "step 3: the loss is nan"),
        (RunEnded("rank 1: boom", status=3), 3, "rank 1: boom"),
        (KeyError("lost"), 1, "KeyError: 'lost'"),
        (RuntimeError(), 1, "RuntimeError: RuntimeError()"),
        (OSError(28, "No space left on device"), 1, "OSError: [Errno 28] No space left on device"),
        (pickle.PicklingError("no"), 1, "PicklingError: no"),
    ],
)
def test_mistake_and_check_speak_for_themselves_and_others_say_their_kind(error, status, said):
    assert describe(error) == said
    assert cause_of(error, 0, 1, "").status == exit_status(error) == status


def test_error_that_cannot_be_printed_is_told_all_the_same():
    assert cause_of(UnprintableError(), 0, 1, "").message == "UnprintableError: it cannot be printed (KeyError)"


def test_file_whose_name_is_no_text_travels_to_the_other_ranks():
    cause = cause_of(ConfigError("images/b\udcff.png: cannot be read"), 0, 1, "")
    assert cause.message == "images/b\\udcff.png: cannot be read"
    assert Cause.model_validate_json(cause.model_dump_json()) == cause


@pytest.mark.parametrize(("agreed", "ranks"), [(True, (0, 1, 2)), (False, (1,))])
def test_stop_names_who_asked(agreed, ranks):
    cause = cause_of(Stopped("SIGTERM after step 7 of 9", agreed=agreed), 1, 3, "step 8: forward")
    assert (cause.kind, cause.ranks, cause.message) == ("stopped", ranks, "SIGTERM after step 7 of 9")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (DistBackendError("NCCL error"), True),
        (DistNetworkError("timed out"), True),
        (dist.DistStoreError("lost"), True),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (NotImplementedError("gloo"), False),
        (ValueError("Connection reset"), False),
        (Stopped("SIGTERM"), False),
    ],
)
def test_only_a_broken_collective_may_be_another_ranks_fault(error, expected):
    assert is_consequence(error) is expected


@pytest.mark.parametrize(("kind", "gone"), [("gone", (1,)), ("silent", (1,)), ("hung", ()), ("raised", ())])
def test_who_is_gone_cannot_speak(kind, gone):
    assert Cause(kind=kind, ranks=(1,), message="").gone == gone


def test_note_says_that_an_error_was_told():
    error = ValueError("boom")
    assert not was_told(error)
    error.add_note(TOLD)
    assert was_told(error)
