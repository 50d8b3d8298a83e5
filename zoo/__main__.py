"""The zoo's command line: `python -m zoo describe BACKBONE --attention NAME` and `python -m zoo audit ...`.

Exit status: 0 done, 2 the user's mistake (one line on stderr), 3 the audit found an error.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import zoo  # loads torch on first use of a name, so that --help stays quick

if TYPE_CHECKING:
    from torch import nn

_EPILOG = "Exit status: 0 done, 2 a mistake in what was asked, 3 the audit found an error."


class _Parser(argparse.ArgumentParser):
    """An argparse parser whose complaint is one line."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where help is, and leave with status 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: What stood on the line after the program's name; None reads it from there.

    Returns:
        The exit status.
    """
    given = _build_parser().parse_args(arguments)
    try:
        model = zoo.create_model(given.backbone, given.attention, init=given.init, seed=given.seed)
        return _audit(model, given) if given.command == "audit" else _describe(model, given)
    except zoo.ZooError as error:
        print(f"python -m zoo {given.command}: {error}", file=sys.stderr)
        return 2


def _build_parser() -> argparse.ArgumentParser:
    shared = _Parser(add_help=False)
    shared.add_argument("backbone", metavar="BACKBONE", help="a timm model, such as vit_tiny_patch16_224")
    shared.add_argument("--attention", required=True, metavar="NAME", help="linear, separate, parameter or your own")
    shared.add_argument(
        "--init",
        metavar="SCHEME",
        help="draw attention's projections by timm, torch, kaiming_raw, normal or trunc_normal; timm's if not given",
    )
    shared.add_argument("--seed", type=int, default=0, metavar="N", help="of everything random (default: %(default)s)")
    shared.add_argument("--json", action="store_true", help="print JSON for a program to read")
    parser = _Parser(
        prog="python -m zoo",
        description="Look at timm Vision Transformers with attention of your own.",
        epilog=_EPILOG,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, help_ in (
        ("describe", "show each attention's parameters, and their spread against what the scheme should give"),
        ("audit", "look for every way in which the model will not train as you believe"),
    ):
        commands.add_parser(name, parents=[shared], help=help_, description=f"{help_.capitalize()}.", epilog=_EPILOG)
    return parser


def _audit(model: "nn.Module", given: argparse.Namespace) -> int:
    report = zoo.audit(model)
    print(json.dumps(report.to_dict(), indent=2) if given.json else report)
    return 3 if report.errors else 0


def _describe(model: "nn.Module", given: argparse.Namespace) -> int:
    rows = _measure(model, given.init)
    if given.json:
        head = {"backbone": given.backbone, "attention": given.attention, "init": given.init, "seed": given.seed}
        print(json.dumps(head | {"attentions": rows}, indent=2))
        return 0
    print(f"{given.backbone}: {len(rows)} attention modules, {given.attention}, drawn by {given.init or 'timm'}")
    for row in rows:
        print(f"{row['name']}: {row['num_heads']} heads, dim {row['dim']}, logit std {row['logit_std']:.3g}")
        for name, shape in row["parameters"].items():
            print(f"  {name:<24} {' x '.join(map(str, shape))}")
        for part, std in row["std"].items():
            expected = row["expected_std"][part]
            print(f"  std of {part:<17} {std:.4g}" + (f", expected {expected:.4g}" if expected is not None else ""))
    return 0


def _measure(model: "nn.Module", init: str | None) -> list[dict[str, Any]]:
    """Return name, shapes and spreads of every attention as plain JSON values."""
    from zoo.init import expected_std
    from zoo.scale import measure_scale

    weights = zoo.attention_weights(model)
    rows = []
    for scale in measure_scale(model):
        parts = {part: weights[scale.name][part] for part in ("q", "k", "v", "out") if part in weights[scale.name]}
        parameters = model.get_submodule(scale.name).named_parameters()
        rows.append(
            {
                "name": scale.name,
                "dim": scale.dim,
                "num_heads": scale.num_heads,
                "parameters": {name: list(parameter.shape) for name, parameter in parameters},
                "std": {part: weight.std().item() for part, weight in parts.items()},
                "expected_std": {part: expected_std(init, *weight.shape) for part, weight in parts.items()},
                "logit_std": scale.logit_std,
                "entropy": scale.entropy,
            }
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
