"""Which network interface joins this machine to the others: gloo would take the one that the host's name stands for.

That name is often 127.0.1.1 (Debian writes it so), and then every rank would be told to find the others at home.
"""

import ipaddress
import socket
from collections.abc import MutableMapping

import psutil

from train.errors import WorldSizeError

_GLOO = "GLOO_SOCKET_IFNAME"


def choose_interface(environ: MutableMapping[str, str]) -> str | None:
    """Have gloo use the interface on the way to the main process, in place; call it before the Accelerator.

    Nothing is done on a single machine, or where GLOO_SOCKET_IFNAME is set already. On GPUs too: the gradients go by
    NCCL, which finds its own, and what ranks agree on beside them by gloo.

    Args:
        environ: The process environment, as a launcher left it.

    Returns:
        The interface that was chosen, None if there was nothing to choose.

    Raises:
        WorldSizeError: If the main process's address is unknown here, or leads nowhere but to this machine itself,
            which has more than one interface to others, or none.
    """
    if int(environ.get("GROUP_WORLD_SIZE", "1")) < 2 or environ.get(_GLOO):
        return None
    environ[_GLOO] = find_interface(environ["MASTER_ADDR"])
    return environ[_GLOO]


def find_interface(main: str) -> str:
    """Return the name of the interface from which packets to the main process leave.

    On the main process's own machine a name for it may mean the loopback; then it is the one interface to others. An
    address of the loopback, or `localhost`, means that all launchers are on one machine.

    Args:
        main: The main process's address, or a name for it.

    Raises:
        WorldSizeError: If it is unknown here, or cannot be told among several.
    """
    own = _own_address(main)
    interfaces = {
        name: {address.address.partition("%")[0] for address in addresses}
        for name, addresses in psutil.net_if_addrs().items()
    }
    if not ipaddress.ip_address(own).is_loopback:
        return next(name for name, addresses in interfaces.items() if own in addresses)
    if main in (own, "localhost"):
        return next(name for name, addresses in interfaces.items() if addresses & {"127.0.0.1", "::1"})
    others = [name for name, addresses in interfaces.items() if any(map(_reaches_others, addresses))]
    if len(others) != 1:
        raise WorldSizeError(
            f"{socket.gethostname()}: the main process's address {main} is this machine's loopback here ({own}), which "
            f"no other machine can reach: launch with --main_process_ip ADDRESS, or set {_GLOO} to one of "
            f"{', '.join(others) or 'its interfaces (it has none to others)'}"
        )
    return others[0]


def _own_address(main: str) -> str:
    """Return the address that this machine would speak to another from; nothing is sent."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(main, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0]).partition("%")[0]
    except OSError as error:
        raise WorldSizeError(
            f"{socket.gethostname()}: no way to the main process at {main} ({error.strerror or error}); "
            "--main_process_ip wants an address that every machine can reach"
        ) from error


def _reaches_others(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:  # a hardware address
        return False
    return not (found.is_loopback or found.is_link_local)
