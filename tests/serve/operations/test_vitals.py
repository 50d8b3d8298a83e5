from dataclasses import dataclass

import pytest

from serve.errors import NotReadyError
from serve.operations.draining import Draining
from serve.operations.vitals import Vitals


@dataclass
class State:
    """A shelf's vital signs."""

    is_alive: bool = True
    is_ready: bool = True
    busy_s: float = 0.0


@pytest.mark.parametrize(
    ("state", "draining", "alive", "ready"),
    [
        (State(), False, "", ""),
        (State(busy_s=4.9), False, "", ""),
        (State(busy_s=5.1), False, "not ended its batch", "not ended its batch"),
        (State(is_alive=False), False, "thread has ended", "thread has ended"),
        (State(is_ready=False), False, "", "still being loaded"),
        (State(), True, "", "going down"),
    ],
)
def test_a_server_lives_while_its_engines_get_on_and_is_ready_while_it_means_to_stay(
    state: State, alive: str, ready: str, *, draining: bool
) -> None:
    going = Draining()
    going.began = draining
    vitals = Vitals(state, going, 5.0)  # type: ignore[arg-type]
    for check, reason in ((vitals.check_alive, alive), (vitals.check_ready, ready)):
        if reason:
            with pytest.raises(NotReadyError, match=reason):
                check()
        else:
            check()
