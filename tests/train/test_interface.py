from types import SimpleNamespace

import pytest

from train.errors import WorldSizeError
from train.interface import choose_interface, find_interface

SEVERAL = {"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.213.7.1"}


@pytest.fixture
def cable(monkeypatch):
    """This machine's end of a cable: `eth7` with an address towards every other machine."""
    addresses = {
        "lo": [SimpleNamespace(address="127.0.0.1")],
        "eth7": [SimpleNamespace(address=text) for text in ("02:fc:00:00:00:01", "fe80::1%eth7", "10.213.7.2")],
    }
    monkeypatch.setattr("train.interface.psutil.net_if_addrs", lambda: addresses)
    monkeypatch.setattr("train.interface._own_address", {"10.213.7.1": "10.213.7.2", "fe80::2": "fe80::1"}.get)


@pytest.mark.usefixtures("cable")
def test_interface_is_the_one_on_the_way_to_the_main_process() -> None:
    environ = dict(SEVERAL)
    assert choose_interface(environ) == "eth7"
    assert environ["GLOO_SOCKET_IFNAME"] == "eth7"
    assert find_interface("fe80::2") == "eth7"


@pytest.mark.usefixtures("cable")
def test_interface_that_the_user_chose_stays() -> None:
    environ = SEVERAL | {"GLOO_SOCKET_IFNAME": "ib0"}
    assert choose_interface(environ) is None
    assert environ["GLOO_SOCKET_IFNAME"] == "ib0"


@pytest.mark.parametrize("environ", [{}, {"GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}])
def test_single_machine_is_left_alone(environ) -> None:
    assert choose_interface(dict(environ)) is None


def test_name_that_means_this_machine_alone_is_refused() -> None:
    with pytest.raises(WorldSizeError, match=r"address localhost is this machine's loopback here .*--main_process_ip"):
        find_interface("localhost")


def test_name_that_nobody_knows_is_refused() -> None:
    with pytest.raises(WorldSizeError, match=r"no way to the main process at no\.such\.host\.invalid"):
        find_interface("no.such.host.invalid")


@pytest.mark.usefixtures("cable")
def test_address_of_no_interface_is_refused(monkeypatch) -> None:
    monkeypatch.setattr("train.interface._own_address", lambda _main: "10.0.0.9")
    with pytest.raises(WorldSizeError, match=r"no interface has the address 10\.0\.0\.9 towards 10\.213\.7\.1"):
        find_interface("10.213.7.1")
