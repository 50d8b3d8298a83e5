from pathlib import Path

from serve.settings import Settings
from serve.settings_table import render_table

TABLE = Path(__file__).parents[2] / "deploy" / "serve" / "SETTINGS.md"


def test_the_table_in_the_repository_is_what_the_code_writes() -> None:
    assert TABLE.read_text() == render_table(), (
        "write it anew: python -m serve.settings_table > deploy/serve/SETTINGS.md"
    )


def test_the_table_has_a_row_for_each_setting() -> None:
    rows = [line for line in render_table().splitlines() if line.startswith("| `")]
    assert len(rows) == len(Settings.model_fields)
    assert "| `--port` | `SERVE_PORT` | `8000` | Port to listen on; 0 takes a free one. |" in rows
    assert all(row.count("|") - row.count("\\|") == 5 for row in rows)
