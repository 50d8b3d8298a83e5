"""`python -m serve.settings_table > deploy/serve/SETTINGS.md`: every setting in one table, written from the code."""

import sys
from typing import Literal, get_args, get_origin

from serve.command_line import flag_of, show_default, variable_of
from serve.settings import GROUPS, Settings

_HEAD = """# Settings of `python -m serve`

A flag wins over its variable, a variable over the default; an empty variable counts as none. Lists are separated by
commas. What is wrong ends the start with exit status 2 and one line that names the flag or variable.

This file is written by `python -m serve.settings_table > deploy/serve/SETTINGS.md`.
"""


def render_table() -> str:
    """Write the settings as Markdown, a table for each group."""
    parts = [_HEAD]
    for title, names in GROUPS.items():
        parts.append(f"\n## {title[:1].upper()}{title[1:]}\n")
        parts.append("| Flag | Variable | Default | Meaning |\n|---|---|---|---|")
        parts.extend(_render_row(name) for name in names)
    return "\n".join(parts) + "\n"


def _render_row(name: str) -> str:
    field = Settings.model_fields[name]
    flag = f"{flag_of(name)}, --no-{name.replace('_', '-')}" if field.annotation is bool else flag_of(name)
    meaning = " ".join(str(field.description).split()).replace("|", "\\|")
    if get_origin(field.annotation) is Literal:
        meaning += f" One of {', '.join(get_args(field.annotation))}."
    return f"| `{flag}` | `{variable_of(name)}` | `{show_default(field)}` | {meaning} |"


if __name__ == "__main__":
    sys.stdout.write(render_table())
