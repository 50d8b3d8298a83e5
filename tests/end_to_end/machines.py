"""Two machines on one: namespaces with addresses, hostnames, processes and disks of their own, joined by a switch.

A machine is two holders. The one at the cable's end (network and hostname) outlives its processes, so that a machine
that is killed still closes its connections, while one whose cable is cut does not. The other is the first process of a
process namespace: with it the kernel ends all others in there. Every holder lives on a pipe that this process holds
open: when it ends, however it ends, nothing is left.
"""

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent.parent
PORT = 29500  # a network namespace has all its ports to itself
_HOLD = "echo ready; exec 3<&0; cat <&3 >/dev/null & wait"  # a shell that waits also reaps what becomes its child

Process = subprocess.Popen[bytes]


class NoNamespaces(Exception):  # noqa: N818  (no fault: the reason to skip)
    """This system does not let us make a namespace."""


@dataclass
class Job:
    """One command on a machine: the process, seen from outside, and the file that it writes both streams to."""

    process: Process
    log: Path

    @property
    def text(self) -> str:
        """What it has said up to now."""
        return self.log.read_text(errors="replace")

    def wait(self, timeout_s: float) -> int:
        """Wait for its end and return its status; fail with what it said if it does not come."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still there after {timeout_s:.0f} s:\n{self.text}") from None

    def wait_for(self, said: str, timeout_s: float = 300) -> None:
        """Wait until it has said something."""
        deadline = time.monotonic() + timeout_s
        while said not in self.text:
            assert self.process.poll() is None, f"ended without {said!r}:\n{self.text}"
            assert time.monotonic() < deadline, f"no {said!r} in {timeout_s:.0f} s:\n{self.text}"
            time.sleep(0.05)


@dataclass
class Machine:
    """One machine.

    Attributes:
        number: 0 or 1, the `--machine_rank`.
        name: Its hostname.
        address: Its own, on the cable.
        disk: Its disk, seen from outside.
        desk: The same disk seen from inside, where commands run: one path on both machines.
        cable: The holder of its end of the cable.
        user: What enters the namespace of users that all this lies in; empty for root.
    """

    number: int
    name: str
    address: str
    disk: Path
    desk: Path
    cable: Process
    user: tuple[str, ...]
    power: Process | None = None
    jobs: list[Job] = field(default_factory=list)

    def switch_on(self) -> None:
        """Start the machine, with nothing but its first process."""
        disk, desk, disks = (shlex.quote(str(path)) for path in (self.disk, self.desk, self.disk.parent))
        mounts = [f"mount --bind {disk} {desk}", f"mount -t tmpfs none {disks}"]  # no way round to the other's disk
        debian = f"127.0.0.1 localhost\n127.0.1.1 {self.name}\n"  # its own name is no address to reach it by
        for name, text in (("hosts", debian), ("resolv.conf", "")):
            file = self.desk.parent / f"{self.name}.{name}"
            file.write_text(text, encoding="utf-8")
            mounts.append(f"mount --bind {shlex.quote(str(file))} /etc/{name}")
        inside = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c"]
        self.power = hold([*self.enter(), *inside, " && ".join([*mounts, _HOLD])])

    def switch_off(self) -> None:
        """Kill all its processes at once; what is on its disk stays."""
        if self.power is not None:
            os.kill(self.first, signal.SIGKILL)
            end(self.power)
            self.power = None
        for job in self.jobs:
            job.process.wait()

    @property
    def first(self) -> int:
        """The first process of the machine, as this process numbers it."""
        assert self.power is not None, f"{self.name} is off"
        return psutil.Process(self.power.pid).children()[0].pid

    def enter(self) -> list[str]:
        """Return the start of a command that runs at the cable's end."""
        return ["nsenter", f"--target={self.cable.pid}", *self.user, "--net", "--uts"]

    def ip(self, *words: str) -> None:
        """Run `ip` at the cable's end."""
        run([*self.enter(), "ip", *words])

    def start(self, command: Sequence[str], environ: Mapping[str, str]) -> Job:
        """Start a command on the machine, in `desk`."""
        log = self.desk.parent / f"{self.name}-{len(self.jobs)}.log"
        spaces = (*self.user, "--net", "--uts", "--mount", "--pid", f"--wdns={self.desk}")
        with log.open("wb") as file:
            process = subprocess.Popen(
                ["nsenter", f"--target={self.first}", *spaces, *command],
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self.jobs.append(Job(process, log))
        return self.jobs[-1]

    def processes(self) -> list[str]:
        """Return the command lines of what runs on the machine."""
        space = (Path("/proc") / str(self.first) / "ns" / "pid").readlink()
        found = []
        for process in psutil.process_iter():
            try:
                inside = (Path("/proc") / str(process.pid) / "ns" / "pid").readlink() == space
                line = process.cmdline()
            except (OSError, psutil.Error):  # it has ended, a zombie too, or is not ours to see
                continue
            if inside and process.pid != self.first and line != ["cat"]:
                found.append(shlex.join(line))
        return found


@dataclass
class Machines:
    """The two machines, the switch between them, and the variables of a new shell."""

    both: tuple[Machine, Machine]
    switch: Process
    user: tuple[str, ...]
    environ: dict[str, str]

    def __getitem__(self, number: int) -> Machine:
        return self.both[number]

    def launch(
        self,
        number: int,
        *arguments: str,
        num_processes: int = 2,
        num_machines: int = 2,
        launcher: Sequence[str] = (),
        **environ: str,
    ) -> Job:
        """Start `accelerate launch --num_machines 2 ... -m train ARGUMENTS` on one machine, as its user would.

        Args:
            number: The machine, and its `--machine_rank`.
            arguments: What `-m train` is given.
            num_processes: Ranks of the whole world, as Accelerate counts them.
            num_machines: 1 starts a world without the other machine.
            launcher: More options of `accelerate launch`.
            environ: Variables beside those of a new shell.
        """
        command = ["accelerate", "launch", "--config_file", str(ROOT / "accelerate_config.yaml")]
        command += ["--num_machines", str(num_machines), "--num_processes", str(num_processes)]
        if num_machines > 1:
            command += ["--machine_rank", str(number), "--main_process_ip", self.both[0].address]
            command += ["--main_process_port", str(PORT)]
        return self.both[number].start([*command, *launcher, "-m", "train", *arguments], self.environ | environ)

    def launch_both(self, *arguments: str, num_processes: int = 2, **environ: str) -> list[Job]:
        """Start the same line on both machines."""
        return [self.launch(number, *arguments, num_processes=num_processes, **environ) for number in (0, 1)]

    def cut(self) -> None:
        """Let nothing through any more; no machine is told, and no connection closed."""
        run([*enter(self.switch, self.user), "ip", "link", "set", "br0", "down"])

    def join(self) -> None:
        """Let everything through."""
        run([*enter(self.switch, self.user), "ip", "link", "set", "br0", "up"])


@contextmanager
def two_machines(base: Path, environ: Mapping[str, str], *, shared: bool) -> Iterator[Machines]:
    """Make two machines, switched on, and take all of it away again.

    Args:
        base: A folder for their disks and for what their commands say.
        environ: The variables of a new shell.
        shared: Whether both have one disk, as a network file system, or each its own and no sight of the other's.

    Raises:
        NoNamespaces: Where they cannot be made; the message says what is missing.
    """
    user = find_user_space()
    (base / "desk").mkdir(parents=True)
    alone = ["unshare", *(("--map-root-user",) if user else ()), "--net"]
    with ExitStack() as stack:
        switch = stack.enter_context(held([*alone, "sh", "-c", f"ip link add br0 type bridge && {_HOLD}"]))
        both = []
        for number in (0, 1):
            name = f"machine{number}"
            disk = base / "disks" / ("shared" if shared else name)
            disk.mkdir(parents=True, exist_ok=True)
            start = f"hostname {name} && ip link set lo up && {_HOLD}"
            own = [*enter(switch, user, net=False), "unshare", "--net", "--uts", "sh", "-c", start]
            cable = stack.enter_context(held(own))
            machine = Machine(number, name, f"10.213.7.{number + 1}", disk, base / "desk", cable, user)
            _plug_in(machine, switch)
            machine.switch_on()
            stack.callback(machine.switch_off)
            both.append(machine)
        machines = Machines((both[0], both[1]), switch, user, dict(environ))
        machines.join()
        yield machines


def find_user_space() -> tuple[str, ...]:
    """Return what enters our namespace of users: nothing for root, who needs none.

    Raises:
        NoNamespaces: If neither root's way nor the other is open.
    """
    probe = ["--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "true"]
    said = []
    for user in ((), ("--user", "--preserve-credentials")):
        tried = subprocess.run(
            ["unshare", *(("--map-root-user",) if user else ()), *probe], capture_output=True, text=True, check=False
        )
        if tried.returncode == 0:
            return user
        said.append(tried.stderr.strip())
    raise NoNamespaces(f"two machines need namespaces of their own: {'; '.join(said)}")


def _plug_in(machine: Machine, switch: Process) -> None:
    port = f"port{machine.number}"
    here = enter(switch, machine.user)
    peer = ["peer", "name", "eth0", "netns", str(machine.cable.pid)]
    run([*here, "ip", "link", "add", port, "type", "veth", *peer])
    run([*here, "ip", "link", "set", port, "master", "br0", "up"])
    machine.ip("address", "add", f"{machine.address}/24", "dev", "eth0")
    machine.ip("link", "set", "eth0", "up")


def enter(holder: Process, user: Sequence[str], *, net: bool = True) -> list[str]:
    """Return the start of a command that runs in a holder's network; `net=False`: among its users alone."""
    spaces = [*user, *(["--net"] if net else [])]
    return ["nsenter", f"--target={holder.pid}", *spaces] if spaces else []


def run(command: Sequence[str]) -> None:
    """Run a command that makes or changes a piece of the network."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNamespaces(f"{shlex.join(command)}: {done.stderr.strip()}")


def hold(command: Sequence[str]) -> Process:
    """Start a holder, and wait until its namespace is there."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    said = process.stdout.readline()
    if said != b"ready\n":
        end(process)
        raise NoNamespaces(f"{shlex.join(command)}: {said.decode().strip()}")
    return process


@contextmanager
def held(command: Sequence[str]) -> Iterator[Process]:
    """Hold a namespace for a while."""
    process = hold(command)
    try:
        yield process
    finally:
        end(process)


def end(process: Process) -> None:
    """Close a holder's pipe, whereupon it ends."""
    process.communicate()
