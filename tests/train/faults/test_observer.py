import os
import signal
import subprocess
import sys

import pytest

from train.config import WatchConfig
from train.faults.cause import Cause
from train.faults.observer import Observer, describe_stack, make_beat
from train.faults.peers import Peer, find_system
from train.faults.pulse import Pulse

HERE, THERE = find_system(), "another boot"
CONFIG = WatchConfig(timeout_s=60, silence_s=20)


class World:
    """Ranks whose signs of life a test makes up; `systems` says where each runs, its pid is this process's."""

    def __init__(self, *systems: str, me: int = 0) -> None:
        self.peers = [
            Peer(rank, f"host{system == THERE:d}", system, os.getpid()) for rank, system in enumerate(systems)
        ]
        self.observer = Observer(self.peers[me], self.peers, CONFIG)
        self.pulses = {rank: Pulse(5, "step 3: forward", 0.0, patient=False) for rank in range(len(systems))}
        self.muted: set[int] = set()
        self.left: set[int] = set()
        self._beats: dict[int, dict] = {}

    def hear(self, now: float) -> None:
        for rank, pulse in self.pulses.items():
            if rank not in self.muted:
                stays = {"left": rank in self.left}
                self._beats[rank] = make_beat(pulse, int(now * 10), now, CONFIG.timeout_s, **stays)
        self.observer.hear([self._beats.get(rank, {}) for rank in self.pulses], now)

    def judge(self, now: float) -> Cause | None:
        self.hear(now)
        return self.observer.judge(now)


def test_ranks_that_get_on_are_well():
    world = World(HERE, HERE)
    for now in range(0, 200, 5):
        world.pulses = {rank: Pulse(now, f"step {now}: forward", float(now), patient=False) for rank in (0, 1)}
        assert world.judge(now) is None


def test_rank_behind_is_named_with_its_place_and_its_stack():
    world = World(HERE, HERE, HERE)
    world.pulses[0] = world.pulses[2] = Pulse(6, "step 3: backward, and the exchange of gradients", 0.0, patient=False)
    assert world.judge(59) is None
    cause = world.judge(61)
    assert (cause.kind, cause.ranks) == ("hung", (1,))
    assert cause.message.startswith(
        f"{world.peers[1]} did not get on for 61 s at step 3: forward, and the other ranks wait"
    )
    assert "rank 1 in " in cause.message
    assert "test_observer.py" in cause.message
    assert cause.message.endswith("raise --watch.timeout_s (now 60)")


def test_ranks_at_the_same_place_hang_together():
    world = World(HERE, HERE)
    cause = world.judge(61)
    assert (cause.kind, cause.ranks) == ("hung", (0, 1))
    assert cause.message.startswith("no rank got on for 61 s, all are at step 3: forward: rank 0 in ")


def test_evaluation_that_is_slow_but_alive_is_not_hung_on_any_rank():
    """The rank with fewer images waits for the one that still gets on."""
    world = World(HERE, HERE)
    world.pulses[1] = Pulse(6, "after step 3: adding up the scores", 0.0, patient=False)
    for now in range(0, 600, 10):
        world.pulses[0] = Pulse(5, "after step 3: evaluating", float(now), patient=False)
        assert world.judge(now) is None


def test_place_that_may_take_as_long_as_it_likes_is_never_hung():
    world = World(HERE, HERE)
    world.pulses[0] = Pulse(5, "publishing", 0.0, patient=True)
    world.pulses[1] = Pulse(9, "step 4: forward", 0.0, patient=False)
    assert world.judge(10_000) is None


def test_rank_that_said_goodbye_is_not_missed_whatever_becomes_of_it():
    world = World(HERE, HERE)
    world.pulses[0] = Pulse(7, "publishing", 0.0, patient=True)
    world.left.add(1)
    world.hear(0)
    world.muted.add(1)
    assert world.judge(1000) is None
    world.peers[1] = Peer(1, "host0", HERE, ended())
    assert world.observer.find_gone(1001, 1001, broken=False) is None


def test_silent_rank_is_named_with_its_last_place():
    world = World(HERE, THERE)
    world.hear(0)
    world.muted.add(1)
    assert world.judge(20) is None
    cause = world.judge(21)
    assert (cause.kind, cause.ranks, cause.gone) == ("silent", (1,), (1,))
    assert cause.message.startswith(f"{world.peers[1]} gave no sign of life for 21 s, last at step 3: forward: ")


def test_silence_is_borne_for_less_once_a_collective_has_broken_off():
    world = World(HERE, THERE, me=1)
    world.hear(0)
    world.muted.add(0)
    assert world.judge(7) is None
    assert world.observer.judge_board(7, broken=False) is None
    world.observer.be_impatient()
    assert world.judge(7).ranks == (0,)
    assert world.observer.judge_board(7, broken=False).ranks == (0,)


def test_ranks_of_a_lost_machine_are_named_together():
    world = World(HERE, HERE, THERE, THERE)
    world.hear(0)
    world.muted |= {2, 3}
    cause = world.judge(21)
    assert cause.ranks == (2, 3)
    assert cause.message.startswith(f"{world.peers[2]}, {world.peers[3]} gave no sign")


def test_rank_that_has_never_been_heard_is_silent_too():
    world = World(HERE, HERE)
    world.muted.add(1)
    assert world.judge(0) is None
    assert "rank 1 (pid" in world.judge(21).message
    assert "last at the start" in world.judge(21).message


@pytest.mark.parametrize(
    ("systems", "ranks"), [((HERE, HERE), (0,)), ((THERE, HERE), (0,)), ((THERE, THERE, HERE), (0, 1))]
)
def test_board_that_does_not_answer_is_the_fault_of_rank_0_or_of_its_machine(systems, ranks):
    world = World(*systems, me=len(systems) - 1)
    world.hear(0)
    assert world.observer.judge_board(20.0 - 1, broken=False) is None
    cause = world.observer.judge_board(21, broken=False)
    assert (cause.kind, cause.ranks) == ("silent", ranks)
    assert "could not be reached for 21 s, last at step 3: forward: machine or network down" in cause.message


def test_board_that_is_closed_is_rank_0_gone_alone_unless_it_said_goodbye():
    world = World(THERE, THERE, HERE, me=2)
    world.hear(0)
    assert world.observer.judge_board(1, broken=True) is None, "it may have told why, and be seen in a moment"
    cause = world.observer.judge_board(4, broken=True)
    assert cause.ranks == (0,)
    assert "has closed its connections, last at step 3: forward: its process is gone" in cause.message
    world.left.add(0)
    world.hear(1)
    assert world.observer.judge_board(100, broken=True) is None


def ended() -> int:
    """Return the pid of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_process_that_ended_without_a_goodbye_is_gone_once_the_board_was_read_later():
    world = World(HERE, HERE)
    world.hear(0)
    world.peers[1] = Peer(1, "host0", HERE, ended())
    assert world.observer.find_gone(10, 9.8, broken=False) is None, "a goodbye may be on its way"
    assert world.observer.find_gone(10.5, 9.8, broken=False) is None
    cause = world.observer.find_gone(11, 10.6, broken=False)
    assert (cause.kind, cause.ranks) == ("gone", (1,))
    assert cause.message.startswith(f"{world.peers[1]} is gone, last at step 3: forward: crashed, or killed")


def test_goodbye_that_is_heard_after_the_end_of_the_process_counts():
    world = World(HERE, HERE)
    world.hear(0)
    world.peers[1] = Peer(1, "host0", HERE, ended())
    assert world.observer.find_gone(10, 9.8, broken=False) is None
    world.left.add(1)
    world.hear(10.3)
    assert world.observer.find_gone(10.5, 10.3, broken=False) is None


def test_process_is_gone_at_once_where_nothing_more_will_be_heard():
    world = World(HERE, HERE, me=1)
    world.hear(0)
    world.peers[0] = Peer(0, "host0", HERE, ended())
    assert world.observer.find_gone(10, 9.8, broken=True).ranks == (0,)


def test_stopped_process_of_this_machine_is_killed_and_no_other():
    world = World(HERE, HERE, THERE, HERE)
    processes = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(3)]
    for rank, process in enumerate(processes, 1):
        world.peers[rank] = Peer(rank, "host", THERE if rank == 2 else HERE, process.pid)
    processes[0].send_signal(signal.SIGSTOP)
    try:
        world.observer.end_silent(Cause(kind="hung", ranks=(1, 3), message=""))
        assert [process.poll() for process in processes] == [None] * 3
        world.observer.end_silent(Cause(kind="silent", ranks=(0, 1, 2), message=""))
        assert processes[0].wait(10) == -signal.SIGKILL
        assert [process.poll() for process in processes[1:]] == [None] * 2
        world.observer.end_silent(Cause(kind="silent", ranks=(1,), message=""))  # it is gone: nothing to do
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_stack_is_told_only_of_a_rank_that_stands_still():
    pulse = Pulse(5, "step 3: forward", 0.0, patient=False)
    assert make_beat(pulse, 1, 60.0, 60.0)["stack"] == ""
    assert "test_observer.py" in str(make_beat(pulse, 1, 61.0, 60.0)["stack"])
    assert describe_stack(1).endswith("describe_stack")
