"""The zoo's command line: `python -m zoo list | describe | audit | convert`.

Exit status: 0 done, 2 the user's mistake (one line on stderr), 3 the audit found an error.
"""

import argparse
import json
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

import zoo  # loads torch on first use of a name, so that --help and list stay quick
from zoo.commands.columns import one_line
from zoo.commands.options import build_parser, gather
from zoo.errors import ZooError

if TYPE_CHECKING:
    from zoo.commands.subjects import Subject


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: What stood on the line after the program's name; None reads it from there.

    Returns:
        The exit status.
    """
    try:
        try:
            return _run(arguments)
        finally:
            if sys.stdout is not None:  # it may be closed
                sys.stdout.flush()  # here, where a reader that has gone is caught
    except BrokenPipeError:  # `| head` has read enough
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it ends
        return 1
    except OSError as error:
        print(f"python -m zoo: {one_line(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(arguments: Sequence[str] | None) -> int:
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show is no reason to fail
    given = build_parser().parse_args(arguments)
    name = f"python -m zoo {given.command}"
    with _one_line_warnings(name):
        try:
            if given.plugins:
                zoo.load_plugins(given.plugins)
            return _COMMANDS[given.command](given)
        except ZooError as error:
            print(f"{name}: {one_line(str(error))}", file=sys.stderr)
            return 2


def _list(given: argparse.Namespace) -> int:
    from zoo.commands import listing  # it needs no torch

    backbones = listing.find_backbones(given.patterns)
    if given.family is not None:
        backbones = listing.select_family(backbones, given.family)
    if given.cls is not None:
        backbones = listing.select_class(backbones, given.cls)
    if given.attention is not None:
        backbones = listing.judge_for(backbones, given.attention)
    if given.refused:
        backbones = tuple(backbone for backbone in backbones if not backbone.is_swappable)
    elif given.swappable or given.attention is not None:
        backbones = tuple(backbone for backbone in backbones if backbone.is_swappable)
    if difference := listing.describe_difference():
        print(f"python -m zoo list: {difference}", file=sys.stderr)
    width = get_terminal_size().columns if sys.stdout.isatty() else None
    _print(given, listing.to_dict(backbones), listing.format_backbones(backbones, width=width))
    return 0


def _describe(given: argparse.Namespace) -> int:
    subject = _load(given)
    description = zoo.describe(subject.model, subject.init, is_trained=subject.is_trained)
    _print(given, {**subject.facts, **description.to_dict()}, f"{subject.title}\n\n{description}")
    return 0


def _audit(given: argparse.Namespace) -> int:
    import torch

    subject = _load(given)
    batch = None
    if given.batch is not None:
        batch = torch.randn(given.batch, *subject.image_shape, generator=torch.Generator().manual_seed(given.seed))
    report = zoo.audit(subject.model, batch=batch)
    _print(given, {**subject.facts, **report.to_dict()}, f"{subject.title}\n{report}")
    return 3 if report.errors else 0


def _convert(given: argparse.Namespace) -> int:
    report = zoo.convert(given.source, given.destination, given.attention, class_names=given.class_names)
    _print(given, report.to_dict(), str(report))
    return 0


_COMMANDS = {"list": _list, "describe": _describe, "audit": _audit, "convert": _convert}


def _load(given: argparse.Namespace) -> "Subject":
    from zoo.commands.subjects import load_subject

    return load_subject(
        given.backbone,
        given.attention,
        init=given.init,
        seed=given.seed,
        pretrained=given.pretrained,
        timm_kwargs=gather(given.model_kwargs),
    )


def _print(given: argparse.Namespace, facts: Mapping[str, Any], text: str) -> None:
    print(json.dumps(facts, indent=2, allow_nan=False) if given.json else text)


@contextmanager
def _one_line_warnings(name: str) -> Iterator[None]:
    """Let a warning be one line on stderr, without the place in the code that it came from."""
    usual = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"{name}: warning: {one_line(str(message))}\n"
    try:
        yield
    finally:
        warnings.formatwarning = usual


if __name__ == "__main__":
    sys.exit(main())
