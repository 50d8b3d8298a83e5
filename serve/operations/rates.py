"""How often one client may ask.

Own code, since the in-memory store of the package `limits` scans every client it knows from a thread that each burst
starts anew: with 300,000 clients a hit took 47 ms at worst, and nothing bounded their number.
"""

import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Callable

from starlette.types import Scope

from serve.errors import RateError

_PERIODS_S = {"second": 1, "minute": 60, "hour": 3600, "day": 86_400}
_MAX_CLIENTS = 100_000  # about 20 MB


class RateLimiter:
    """A sliding window for each client: the current period's count, and the last one's by the share still in sight.

    The clients that asked longest ago are forgotten when there are too many.

    Args:
        rate: "100/second"; also minute, hour, day.
        clock: Seconds, never going back.
        max_clients: How many clients are remembered.
    """

    def __init__(
        self, rate: str, *, clock: Callable[[], float] = time.monotonic, max_clients: int = _MAX_CLIENTS
    ) -> None:
        count, _, period = rate.partition("/")
        self.limit, self.period_s = int(count), _PERIODS_S[period]
        self._clock, self._max_clients = clock, max_clients
        self._windows: OrderedDict[str, tuple[int, int, int]] = OrderedDict()

    def __len__(self) -> int:
        """Number of clients that are remembered."""
        return len(self._windows)

    def hit(self, client: str) -> None:
        """Count one request of `client`.

        Raises:
            RateError: If it is one too many, which is not counted; it says when to try again.
        """
        period, part = divmod(self._clock() / self.period_s, 1)
        index, last, now = self._windows.get(client, (int(period), 0, 0))
        passed = int(period) - index
        if passed:
            last, now = (now, 0) if passed == 1 else (0, 0)
        self._windows[client] = (int(period), last, now)
        self._windows.move_to_end(client)
        if len(self._windows) > self._max_clients:
            self._windows.popitem(last=False)
        if math.floor(last * (1 - part)) + now + 1 > self.limit:
            raise RateError("more requests than one client may send; try again later", self._wait(last, now, part))
        self._windows[client] = (int(period), last, now + 1)

    def _wait(self, last: int, now: int, part: float) -> int:
        """Whole seconds, at least 1, until one more request fits."""
        share = 1 - part  # at the turn of the period, or before it when the last one's share has shrunk enough
        if now < self.limit:
            share -= (self.limit - now) / last
        return max(1, math.ceil(share * self.period_s))


def client_of(scope: Scope) -> str:
    """Name the client by its address, an IPv6 one by its /64: that is what one customer is given."""
    if not scope.get("client"):
        return "local"
    host = str(scope["client"][0])[:64]
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    return str(address.ipv4_mapped or ipaddress.IPv6Network((address, 64), strict=False))
