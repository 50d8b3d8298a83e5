import threading
import time

import pytest

from serve.batching.turns import Turns, turns_on


def test_turns_go_in_the_order_of_asking() -> None:
    turns, order = Turns(), []

    def take(i: int) -> None:
        with turns:
            order.append(i)

    threads = [threading.Thread(target=take, args=[i]) for i in range(5)]
    with turns:
        for i, thread in enumerate(threads):
            thread.start()
            while len(turns._asking) <= i:
                time.sleep(0.001)
        assert order == []
    with turns:  # asked for last: all others had theirs
        assert order == [0, 1, 2, 3, 4]
    for thread in threads:
        thread.join()


def test_a_turn_ends_however_it_is_left() -> None:
    turns = Turns()
    with pytest.raises(ZeroDivisionError), turns:
        raise ZeroDivisionError
    with turns:
        pass


def test_one_device_has_one_for_the_process() -> None:
    assert turns_on("cpu") is turns_on("cpu")
    assert turns_on("cpu") is not turns_on("cuda:0")
