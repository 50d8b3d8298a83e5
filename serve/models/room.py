"""Whether the model that a request asks has room at all, told from its path alone, before it is routed or read."""

import re
from typing import Final, NamedTuple

from starlette.types import Scope

from serve.errors import NotReadyError, QueueFullError, UnknownModelError
from serve.models.served import Shelf

_ASKS: Final = re.compile(r"(/v2)?/models/(?P<name>[^/]+)(/versions/[^/]+)?/(invocations|infer)")


class _Route(NamedTuple):
    """What metrics and log lines call a request that never got to its route."""

    path: str


class RoomCheck:
    """Refuses at the door what would find the queue full.

    Args:
        shelf: The models.
    """

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    def __call__(self, scope: Scope) -> None:
        """Raise QueueFullError for a request whose model has no room for one image; pass all others on."""
        name, route = None, "/invocations"
        if scope["path"] != route:
            asked = _ASKS.fullmatch(scope["path"])
            if asked is None:
                return
            name = asked["name"]
            version = "/versions/{version}" if asked[3] else ""
            route = f"{asked[1] or ''}/models/{{name}}{version}/{asked[4]}"
        try:
            served = self._shelf.find(name)
        except (NotReadyError, UnknownModelError):
            return  # its route says so
        try:
            served.batcher.check_room()
        except QueueFullError:
            scope["route"] = _Route(route)
            raise
