from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from serve.client.backoff import Backoff, read_retry_after


@pytest.mark.parametrize("tries", [1, 2, 3, 4])
def test_waits_double_and_are_spread_over_their_upper_half(tries):
    waits = [Backoff(first_s=1, longest_s=100).find_wait(tries) for _ in range(200)]
    longest = 2 ** (tries - 1)
    assert longest / 2 <= min(waits) < 0.6 * longest
    assert 0.9 * longest < max(waits) <= longest


def test_no_wait_is_longer_than_the_longest():
    backoff = Backoff(retries=10_000, first_s=1, longest_s=7)
    assert 3.5 <= backoff.find_wait(9_999) <= 7


def test_a_server_is_not_asked_before_the_time_it_names():
    waits = [Backoff(first_s=1).find_wait(1, asked_s=20) for _ in range(200)]
    assert 20 <= min(waits) < max(waits) <= 20.5


def test_it_gives_up_after_the_retries_and_where_the_server_asks_for_too_much():
    assert Backoff(retries=2).find_wait(2) is not None
    assert Backoff(retries=2).find_wait(3) is None
    assert Backoff(retries=0).find_wait(1) is None
    assert Backoff(longest_s=10).find_wait(1, asked_s=11) is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (None, 0),
        ("3", 3),
        (" 3 ", 3),
        ("0", 0),
        ("soon", 0),
        ("-3", 0),
        ("", 0),
        ("٣", 0),
        ("9" * 5000, 999_999_999_999),
    ],
)
def test_retry_after_as_seconds(text, seconds):
    assert read_retry_after(text) == seconds


def test_retry_after_as_a_date():
    date = datetime.now(UTC) + timedelta(seconds=100)
    assert 98 <= read_retry_after(format_datetime(date, usegmt=True)) <= 100
    assert 98 <= read_retry_after(format_datetime(date.replace(tzinfo=None))) <= 100
    assert read_retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0
