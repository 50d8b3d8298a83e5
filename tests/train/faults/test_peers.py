import os
import subprocess
import sys

from accelerate import Accelerator

from train.faults.peers import Peer, find_peers, find_system, is_gone
from train.ranks import describe_ranks

HERE = find_system()


def child() -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def peer_of(pid: int, system: str = HERE) -> Peer:
    return Peer(1, "here", system, pid)


def test_process_that_has_ended_is_gone_also_before_its_launcher_has_noticed():
    with child() as process:
        peer = peer_of(process.pid)
        assert not is_gone(peer, HERE)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
        assert is_gone(peer, HERE)
    assert is_gone(peer, HERE)


def test_of_another_machine_nothing_is_known():
    with child() as process:
        process.kill()
    assert not is_gone(peer_of(process.pid, "another boot"), HERE)


def test_process_of_somebody_else_is_there():
    assert not is_gone(peer_of(1), HERE)


def test_peers_are_named_for_people():
    accelerator = Accelerator(cpu=True)
    (me,) = find_peers(accelerator, describe_ranks(accelerator))
    assert (me.rank, me.pid, me.system) == (0, os.getpid(), HERE)
    assert str(me) == f"rank 0 (pid {os.getpid()} on {me.hostname})"


def test_process_in_a_container_of_its_own_is_of_another_system():
    assert "pid:[" in HERE, "the same pid may mean two processes of one machine"
