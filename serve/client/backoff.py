"""How long to wait before the next try: exponential, with jitter, and never less than the server asks."""

import random
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

RETRIED = frozenset({429, 503, 504})
"""Statuses that another try may mend. Every other 4xx says that the request is wrong, and 500 that the server is."""


@dataclass(frozen=True)
class Backoff:
    """Waiting between tries.

    Attributes:
        retries: Most tries after the first.
        first_s: Seconds before the first retry at most; each further one may wait twice as long.
        longest_s: Seconds of one wait at most. A server that asks for more is not asked again.
    """

    retries: int = 5
    first_s: float = 0.5
    longest_s: float = 60

    def find_wait(self, tries: int, asked_s: float = 0) -> float | None:
        """Return the seconds to wait after so many tries, None where it is time to give up.

        The jitter spreads clients that were refused together: between half of the wait and all of it, or from what the
        server asks for to that and half of the wait.
        """
        if tries > self.retries or asked_s > self.longest_s:
            return None
        half = min(self.longest_s, self.first_s * 2.0 ** min(tries - 1, 60)) / 2
        return min(self.longest_s, max(half, asked_s) + random.uniform(0, half))


def read_retry_after(text: str | None) -> float:
    """Return the seconds that a Retry-After header asks for, a count or a date; 0 without one that can be read."""
    if text is None:
        return 0
    if text.strip().isascii() and text.strip().isdigit():
        return float(text.strip()[:12])
    try:
        date = parsedate_to_datetime(text)
    except ValueError:
        return 0
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)
    return max(0.0, (date - datetime.now(UTC)).total_seconds())
