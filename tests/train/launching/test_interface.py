from types import SimpleNamespace

import pytest

from train.errors import WorldSizeError
from train.launching.interface import choose_interface, find_interface

SEVERAL = {"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.213.7.1"}


@pytest.fixture
def interfaces(monkeypatch):
    """This machine's interfaces, which a test may change: the loopback, and `eth7` towards every other machine."""
    found = {"lo": ["127.0.0.1", "::1"], "eth7": ["02:fc:00:00:00:01", "fe80::1%eth7", "10.213.7.2"]}
    monkeypatch.setattr(
        "train.launching.interface.psutil.net_if_addrs",
        lambda: {name: [SimpleNamespace(address=text) for text in texts] for name, texts in found.items()},
    )
    own = {"10.213.7.1": "10.213.7.2", "fe80::2": "fe80::1", "node1": "127.0.1.1", "localhost": "127.0.0.1"}
    monkeypatch.setattr("train.launching.interface._own_address", lambda main: own.get(main, main))
    return found


@pytest.mark.usefixtures("interfaces")
def test_interface_is_the_one_on_the_way_to_the_main_process() -> None:
    environ = dict(SEVERAL)
    assert choose_interface(environ) == "eth7"
    assert environ["GLOO_SOCKET_IFNAME"] == "eth7"
    assert find_interface("fe80::2") == "eth7"


@pytest.mark.usefixtures("interfaces")
def test_interface_that_the_user_chose_stays() -> None:
    environ = SEVERAL | {"GLOO_SOCKET_IFNAME": "ib0"}
    assert choose_interface(environ) is None
    assert environ["GLOO_SOCKET_IFNAME"] == "ib0"


@pytest.mark.parametrize("environ", [{}, {"GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}])
def test_single_machine_is_left_alone(environ) -> None:
    assert choose_interface(dict(environ)) is None


@pytest.mark.usefixtures("interfaces")
def test_main_machine_whose_name_is_its_loopback_takes_its_one_interface_to_others() -> None:
    assert find_interface("node1") == "eth7"


@pytest.mark.parametrize("main", ["localhost", "127.0.0.1", "127.0.1.1"])
def test_launchers_that_share_a_machine_speak_over_its_loopback(interfaces, main) -> None:
    interfaces["ib0"] = ["10.0.0.1"]
    assert find_interface(main) == "lo"


@pytest.mark.parametrize(
    ("more", "named"), [({"ib0": ["10.0.0.1"]}, "one of eth7, ib0"), ({"eth7": []}, "has none to")]
)
def test_interface_that_cannot_be_told_is_the_users_to_name(interfaces, more, named) -> None:
    interfaces.update(more)
    with pytest.raises(WorldSizeError, match=rf"address node1 is this machine's loopback here .*_ip ADDRESS.*{named}"):
        find_interface("node1")


def test_name_that_nobody_knows_is_refused() -> None:
    with pytest.raises(WorldSizeError, match=r"no way to the main process at no\.such\.host\.invalid"):
        find_interface("no.such.host.invalid")
