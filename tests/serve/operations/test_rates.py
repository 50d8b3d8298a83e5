import pytest

from serve.errors import RateError
from serve.operations.rates import RateLimiter, client_of


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def count(limiter: RateLimiter, client: str, tries: int) -> int:
    """Number of `tries` that pass."""
    passed = 0
    for _ in range(tries):
        try:
            limiter.hit(client)
            passed += 1
        except RateError:
            pass
    return passed


@pytest.mark.parametrize(("rate", "period_s"), [("5/second", 1), ("5/minute", 60), ("5/hour", 3600), ("5/day", 86_400)])
def test_a_client_has_its_rate_and_no_other_pays_for_it(clock: Clock, rate: str, period_s: int) -> None:
    clock.now = 10.0 * period_s
    limiter = RateLimiter(rate, clock=clock)
    assert count(limiter, "a", 9) == 5
    assert count(limiter, "b", 9) == 5
    clock.now += 2 * period_s
    assert count(limiter, "a", 9) == 5


def test_a_window_slides_over_the_turn_of_its_period(clock: Clock) -> None:
    limiter = RateLimiter("10/second", clock=clock)
    clock.now = 1000.9
    assert count(limiter, "a", 20) == 10
    clock.now = 1001.01
    assert count(limiter, "a", 20) == 1  # not ten more at once
    clock.now = 1001.5
    assert count(limiter, "a", 20) == 4  # half of the last period's ten is still in sight


def test_an_even_client_at_its_rate_is_never_refused(clock: Clock) -> None:
    limiter = RateLimiter("10/second", clock=clock)
    for _ in range(300):
        clock.now += 0.1001
        limiter.hit("a")


@pytest.mark.parametrize("rate", ["1/second", "7/second", "100/minute", "3/hour"])
@pytest.mark.parametrize("part", [0.0, 0.3, 0.999])
def test_who_waits_as_told_is_answered(clock: Clock, rate: str, part: float) -> None:
    limiter = RateLimiter(rate, clock=clock)
    clock.now = (50 + part) * limiter.period_s
    count(limiter, "a", 200)
    for _ in range(5):  # also with hits in two periods
        count(limiter, "a", limiter.limit)
        with pytest.raises(RateError, match="more requests than one client may send") as raised:
            limiter.hit("a")
        assert 1 <= raised.value.retry_after_s <= 2 * limiter.period_s
        clock.now += raised.value.retry_after_s + 1e-6
        limiter.hit("a")


def test_what_is_refused_does_not_count(clock: Clock) -> None:
    limiter = RateLimiter("2/second", clock=clock)
    count(limiter, "a", 1000)
    clock.now += 1.6
    assert count(limiter, "a", 5) == 2


def test_the_number_of_clients_is_bounded_and_the_newest_stay(clock: Clock) -> None:
    limiter = RateLimiter("1/hour", clock=clock, max_clients=100)
    for i in range(10_000):
        limiter.hit(str(i))
        if i >= 50:
            assert count(limiter, "the one who goes on", 1) == (i == 50)
    assert len(limiter) == 100


@pytest.mark.parametrize(
    ("client", "name"),
    [
        (("10.0.0.1", 5), "10.0.0.1"),
        (("2001:db8:1:2:3:4:5:6", 5), "2001:db8:1:2::/64"),
        (("2001:db8:1:2::9", 5), "2001:db8:1:2::/64"),
        (("2001:db8:1:3::9", 5), "2001:db8:1:3::/64"),
        (("::ffff:10.0.0.1", 5), "10.0.0.1"),
        (("fe80::1%eth0", 5), "fe80::/64"),
        (("not:an:address", 0), "not:an:address"),
        (("x" * 1000, 0), "x" * 64),
        (None, "local"),
    ],
)
def test_a_client_is_its_address_or_its_network(client: object, name: str) -> None:
    assert client_of({"type": "http", "client": client}) == name
