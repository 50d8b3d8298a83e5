"""Ask an endpoint: `python -m serve.client`, and `Client` for programs. Needs httpx and tqdm alone."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serve.client.backoff import Backoff as Backoff
    from serve.client.connection import Client as Client
    from serve.client.errors import ClientError as ClientError

_HOMES = {"Backoff": "backoff", "Client": "connection", "ClientError": "errors"}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'serve.client' has no attribute {name!r}")
    return getattr(import_module(f"serve.client.{_HOMES[name]}"), name)  # late: so the command can say what is missing
