"""Read deploy/mlflow/compose.yaml as `docker compose` does: `${NAME}`, `${NAME:-default}`, `${NAME:?message}`."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).parent.parent.parent / "deploy" / "mlflow" / "compose.yaml"
_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::(?P<kind>[-?])(?P<text>[^}]*))?\}")


def read_compose(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the file's services with their variables filled in.

    Raises:
        KeyError: If a variable that the file requires is missing or empty; with the file's own message.
    """

    def fill(found: re.Match[str]) -> str:
        value = environ.get(found["name"], "")
        if not value and found["kind"] == "?":
            raise KeyError(f"{found['name']}: {found['text']}")
        return value or (found["text"] if found["kind"] == "-" else "")

    def walk(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: walk(value) for key, value in node.items()}
        if isinstance(node, list):
            return [walk(value) for value in node]
        return _VARIABLE.sub(fill, node) if isinstance(node, str) else node

    services: dict[str, Any] = walk(yaml.safe_load(FILE.read_text(encoding="utf-8")))["services"]
    return services
