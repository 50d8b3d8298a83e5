"""The command line's grammar: what each command takes, and how its values are read."""

import argparse
import ast
import json
from collections.abc import Iterable
from typing import Any, NoReturn

from zoo.card import NOT_IN_KWARGS
from zoo.commands.columns import one_line
from zoo.errors import ZooError

_STATUS = "Exit status: 0 done, 2 a mistake in what was asked, 3 the audit found an error."
_OWN = {"attention", "backbone", "checkpoint_path", "init", "pretrained", "seed"}
_MOST_IMAGES = 1024
_LIST = """python -m zoo list 'vit_tiny*'
python -m zoo list --family swin_transformer --json
python -m zoo list --refused --class Attention2d"""
_DESCRIBE = """python -m zoo describe vit_tiny_patch16_224 --attention parameter --init torch
python -m zoo describe vit_tiny_patch16_224 --attention linear --model-kwargs img_size=64 patch_size=8 depth=4
python -m zoo describe runs/digits/latest/bundle"""
_AUDIT = """python -m zoo audit vit_tiny_patch16_224 --attention parameter --init normal
python -m zoo audit vit_tiny_patch16_224 --attention parameter --batch
python -m zoo audit runs/digits/latest/bundle --json"""
_CONVERT = """python -m zoo convert runs/digits/latest/bundle for_timm --attention timm
python -m zoo convert for_timm digits_parameter --attention parameter"""


class _Parser(argparse.ArgumentParser):
    """An argparse parser whose complaint is one line."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where help is, and leave with status 2."""
        self.exit(2, f"{self.prog}: {one_line(message)}; see {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; it leaves with status 2 and one line on a mistake."""
    parser = _Parser(
        prog="python -m zoo",
        description="Look at timm Vision Transformers with attention of your own, and convert them.",
        epilog=_epilog("python -m zoo list 'vit_tiny*'\npython -m zoo COMMAND --help"),
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add = {
        "list": (_add_list, "show which timm models can be swapped, and why the others cannot", "", _LIST),
        "describe": (
            _add_subject,
            "show what each attention stores, and its spread against what the scheme gives",
            "A line for each attention; ! marks what to look at, and the last lines say why.",
            _DESCRIBE,
        ),
        "audit": (
            _add_audit,
            "look for every way in which a model will not train as you believe",
            "An error among the findings gives status 3; warnings and notes give 0.",
            _AUDIT,
        ),
        "convert": (
            _add_convert,
            "write a trained model with another attention, or for stock timm: the same function",
            "What the new form cannot hold is said.",
            _CONVERT,
        ),
    }
    for name, (add_arguments, what, more, examples) in add.items():
        description = f"{what[0].upper()}{what[1:]}.\n{more}".strip()
        add_arguments(commands.add_parser(name, help=what, description=description, epilog=_epilog(examples)))
    return parser


def gather(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return what --model-kwargs gave as a dict; raise ZooError for a key given twice."""
    gathered: dict[str, Any] = {}
    for key, value in pairs:
        if key in gathered:
            raise ZooError(f"--model-kwargs: {key} is given twice, as {gathered[key]!r} and as {value!r}")
        gathered[key] = value
    return gathered


def _add_list(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help="a timm name, or a glob in quotes: 'vit_tiny*'")
    parser.add_argument("--family", metavar="NAME", help="only models of a file of timm's, as swin_transformer")
    parser.add_argument(
        "--class", dest="cls", metavar="NAME", help="only those with attention of a class, as EvaAttention"
    )
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--swappable", action="store_true", help="only those that can be swapped")
    chosen.add_argument("--refused", action="store_true", help="only those that cannot")
    parser.add_argument(
        "--attention",
        metavar="NAME",
        help="only those that this variant fits: your own may fit fewer than the built-in",
    )
    _add_plugins(parser)
    _add_json(parser)


def _add_subject(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "backbone", metavar="BACKBONE", help="a timm name, local-dir: and a folder of timm's, or a bundle's directory"
    )
    parser.add_argument("--attention", metavar="NAME", help="linear, separate, parameter or your own; a bundle has it")
    parser.add_argument(
        "--init",
        metavar="SCHEME",
        help="draw attention's projections by timm, torch, kaiming_raw, normal or trunc_normal (default: timm)",
    )
    parser.add_argument(
        "--seed", type=_seed, default=0, metavar="N", help="of everything random (default: %(default)s)"
    )
    parser.add_argument(
        "--pretrained",
        nargs="?",
        const=True,
        default=False,
        metavar="PATH",
        help="load trained weights: timm's own, or those of a bundle, a checkpoint, a folder or a .safetensors file",
    )
    parser.add_argument(
        "--model-kwargs",
        nargs="+",
        default=[],
        action="extend",
        type=_pair,
        metavar="KEY=VALUE",
        help="arguments of timm's for the backbone: num_classes=10 img_size=64 global_pool=avg",
    )
    _add_plugins(parser)
    _add_json(parser)


def _add_audit(parser: argparse.ArgumentParser) -> None:
    _add_subject(parser)
    parser.add_argument(
        "--batch",
        nargs="?",
        const=2,
        type=_count,
        metavar="N",
        help="also try one forward and backward pass of N random images (2 if not said) on a copy",
    )


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="SRC", help="a bundle, a folder of timm's, or a timm name with trained weights"
    )
    parser.add_argument("destination", metavar="DST", help="the directory to write; it must not exist yet")
    parser.add_argument(
        "--attention",
        required=True,
        metavar="NAME",
        help="linear, separate, parameter or your own writes a bundle; timm writes a folder that stock timm loads",
    )
    parser.add_argument(
        "--class-names", nargs="+", metavar="NAME", help="names for the classes of a model of timm's, in their order"
    )
    _add_plugins(parser)
    _add_json(parser)


def _add_plugins(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--plugins",
        nargs="+",
        default=[],
        action="extend",
        metavar="FILE",
        help="files or modules that register variants of your own",
    )


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON for a program to read")


def _pair(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise argparse.ArgumentTypeError(f"wanted is KEY=VALUE, such as depth=6, got {text!r}")
    if key in _OWN:
        raise argparse.ArgumentTypeError(f"{key} has a place of its own on the line; leave it out here")
    if key in NOT_IN_KWARGS - {"num_classes"}:
        raise argparse.ArgumentTypeError(f"{key} is not passed on to timm")
    return key, _read_value(value)


def _read_value(text: str) -> Any:
    """Read a value as JSON (6, 0.1, true, [1, 2]), or else as Python (True, (1, 2)), or else as text."""
    readers: Iterable[Any] = (json.loads, ast.literal_eval)
    for read in readers:
        try:
            value = read(text)
            json.dumps(value, allow_nan=False)  # what a card could hold: no set, no NaN
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        return value
    return text


def _read_whole(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:  # or a number of thousands of digits
        raise argparse.ArgumentTypeError(f"wanted is a whole number, got {text[:40]!r}") from error


def _seed(text: str) -> int:
    seed = _read_whole(text)
    if not 0 <= seed < 2**63:
        raise argparse.ArgumentTypeError(f"wanted is a number from 0 to 2**63 - 1, got {text}")
    return seed


def _count(text: str) -> int:
    count = _read_whole(text)
    if not 1 <= count <= _MOST_IMAGES:
        raise argparse.ArgumentTypeError(f"wanted are 1 to {_MOST_IMAGES} images, got {count}")
    return count


def _epilog(examples: str) -> str:
    lines = "\n".join(f"  {line}" for line in examples.splitlines())
    return f"examples:\n{lines}\n\n{_STATUS}"
