import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from train.errors import ConfigError, RunEnded, WorldSizeError
from train.launching import meeting as module
from train.launching.meeting import Arrival, check_asked, meeting

Environ = Callable[[int], dict[str, str]]


@contextmanager
def launcher(world_size: int) -> Iterator[Environ]:
    """The store that the first machine's launcher keeps, and each rank's environment, one rank on each machine."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    port = store.port  # it serves as long as it is held

    def environ(rank: int) -> dict[str, str]:
        return {
            "WORLD_SIZE": str(world_size),
            "RANK": str(rank),
            "GROUP_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    yield environ
    del store


def gather(works: dict[int, Callable[[], object]], environ: Environ, command: Callable[[int], str]) -> dict[int, str]:
    """Let some ranks meet, each in a thread; return what each one raised, "" for nothing."""
    outcomes: dict[int, str] = {}

    def attend(rank: int) -> None:
        try:
            with meeting(environ(rank), command(rank).split()) as patience:
                patience.timeout_s = 1.0
                works[rank]()
            outcomes[rank] = ""
        except Exception as error:
            outcomes[rank] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=attend, args=(rank,)) for rank in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def launched(_rank: int) -> str:
    return "accelerate launch --num_machines 2 --num_processes 2 -m train"


def fine() -> None:
    """A rank's work that succeeds."""


def test_ranks_that_all_come_go_on(monkeypatch) -> None:
    monkeypatch.setattr("train.launching.meeting.socket.gethostname", lambda: "ada")
    with launcher(2) as environ:
        assert gather({0: fine, 1: fine}, environ, launched) == {0: "", 1: ""}


def test_what_fails_on_one_machine_is_told_on_all(monkeypatch) -> None:
    monkeypatch.setattr("train.launching.meeting.socket.gethostname", lambda: "ada")

    def fail() -> None:
        raise ConfigError("no recipe 'mine'")

    with launcher(2) as environ:
        outcomes = gather({0: fine, 1: fail}, environ, launched)
    assert outcomes == {0: "RunEnded: rank 1 on ada: no recipe 'mine'", 1: "ConfigError: no recipe 'mine'"}


def test_refusal_brings_its_exit_status() -> None:
    def fail() -> None:
        raise KeyError("lost")

    with launcher(2) as environ:
        thread = threading.Thread(target=gather, args=({1: fail}, environ, launched))
        thread.start()
        with pytest.raises(RunEnded, match=r"rank 1 on .*: 'lost'") as caught, meeting(environ(0), []):
            pass
        thread.join()
    assert caught.value.status == 1


def test_mistake_of_all_is_raised_by_each_without_waiting(monkeypatch) -> None:
    monkeypatch.setattr(module, "_LINGER_S", 600.0)  # a rank that waited for it would not end in this test's time

    def fail() -> None:
        raise ConfigError("no recipe 'mine'")

    with launcher(2) as environ:
        outcomes = gather({0: fail, 1: fail}, environ, launched)
    assert set(outcomes.values()) == {"ConfigError: no recipe 'mine'"}


def test_rank_that_does_not_come_is_named(caplog, monkeypatch) -> None:
    monkeypatch.setattr(module, "_SAY_S", 0.1)
    caplog.set_level(logging.INFO, "train.launching.meeting")
    with launcher(3) as environ:
        outcomes = gather({0: fine, 1: fine}, environ, launched)
    for rank in (0, 1):
        assert f"WorldSizeError: rank {rank} on " in outcomes[rank]
        assert "waited 1 s for rank 2 of 3: what the launcher there printed" in outcomes[rank]
    assert "waiting for rank 2 of 3, 1 s at most" in caplog.messages


def test_launcher_that_is_gone_is_named(monkeypatch) -> None:
    monkeypatch.setattr(module, "_ANSWER", timedelta(seconds=0.2))
    with launcher(2) as environ:
        environment = environ(1) | {"MASTER_PORT": "1"}
    gone = r"rank 1 on .*: the launcher at 127\.0\.0\.1:1, machine 0, has gone"
    with pytest.raises(WorldSizeError, match=gone), meeting(environment, []):
        pass


def test_machines_launched_for_different_worlds_are_named() -> None:
    with launcher(3) as environ:
        outcomes = gather(
            dict.fromkeys(range(3), fine),
            environ,
            lambda rank: f"accelerate launch --num_processes {4 if rank < 2 else 2} -m train",
        )
    assert len(set(outcomes.values())) == 1
    assert "different numbers of processes: 4 on " in outcomes[0]
    assert "(machine 1), 2 on " in outcomes[0]


def arrivals(*asked: int | None) -> list[Arrival]:
    return [Arrival(rank, rank, f"host{rank}", count) for rank, count in enumerate(asked)]


def test_number_that_cannot_be_shared_out_is_refused() -> None:
    with pytest.raises(WorldSizeError, match=r"asked for 3 processes and started 2: .* --num_processes 2 or 4"):
        check_asked(arrivals(3, 3))


@pytest.mark.parametrize("asked", [(2, 2), (None, None), (2, None)])
def test_world_of_the_size_that_was_asked_for_is_fine(asked) -> None:
    check_asked(arrivals(*asked))


@pytest.mark.parametrize(
    "environ", [{}, {"WORLD_SIZE": "2"}, {"WORLD_SIZE": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}]
)
def test_without_a_launchers_store_the_work_is_all_there_is(environ) -> None:
    with pytest.raises(ConfigError, match="own"), meeting(environ):
        raise ConfigError("own")
    with meeting(environ) as patience:
        assert patience.timeout_s == 600
