"""What the launcher that started this process was asked for, read off its command line."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

import psutil
from accelerate.commands.config.config_args import default_config_file, load_config_from_file
from accelerate.commands.launch import launch_command_parser


@dataclass(frozen=True)
class LaunchLine:
    """One `accelerate launch`.

    Attributes:
        num_processes: Ranks of the whole world that it was asked for, on the line or in its config; None for neither.
        target: What it starts, as typed: "-m train ...".
    """

    num_processes: int | None
    target: str


def read_launch_line(command: Sequence[str]) -> LaunchLine | None:
    """Return what a command line asks `accelerate launch` for, None if it is another command."""
    options = _launch_options(command)
    if options is None:
        return None
    launch = launch_command_parser().parse_known_args(options)[0]
    asked = launch.num_processes
    if asked is None and (launch.config_file or (Path(default_config_file).is_file() and not launch.cpu)):
        asked = load_config_from_file(launch.config_file).num_processes
    return LaunchLine(asked, f"{'-m ' if launch.module else ''}{launch.training_script} ...")


def find_command() -> list[str]:
    """Return the command line of the process that started this one."""
    parent = psutil.Process().parent()
    try:
        return parent.cmdline() if parent else []
    except psutil.Error:  # a parent that has gone, or that another user owns, is no launcher of ours
        return []


def _launch_options(command: Sequence[str]) -> list[str] | None:
    """Return what follows `accelerate launch` in a command line, or None if the line is another command."""
    words = list(command)
    if words and PurePath(words[0]).name.startswith("python"):
        words = words[1:]
        while words and words[0].startswith("-") and words[0] != "-m":  # python's own flags, as -u
            words = words[1:]
    if words[:2] == ["-m", "accelerate.commands.launch"]:
        return words[2:]
    if words[:2] in (["-m", "accelerate"], ["-m", "accelerate.commands.accelerate_cli"]):
        words = ["accelerate", *words[2:]]
    if words and PurePath(words[0]).name == "accelerate-launch":
        return words[1:]
    if len(words) > 1 and PurePath(words[0]).name == "accelerate" and words[1] == "launch":
        return words[2:]
    return None
