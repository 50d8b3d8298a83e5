"""`python -m serve.equip BUNDLE NEW --engine onnx`: write the same bundle with another engine, compared and proven."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from serve.equip.write import equip
from serve.errors import EngineError
from zoo.card import EngineChoice
from zoo.errors import UnfitEngineError, ZooError
from zoo.plugins import load_plugins

_MISTAKE, _FAULT = 2, 3
_EPILOG = """BUNDLE stays as it is. NEW gets the same weights and golden example, a card that names the engine, and for
onnx a model.onnx; the engine's logits are compared with torch's on several batch sizes before NEW gets its name.

  python -m serve.equip runs/digits/latest/bundle digits_onnx --engine onnx
  python -m serve digits_onnx

Exit status: 0 done, 2 a mistake in what was asked, 3 the engine cannot compute the model; NEW is then not written."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Leave with status 2 and one line."""
        self.exit(_MISTAKE, f"error: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the bundle; return the exit status."""
    parser = _Parser(
        prog="python -m serve.equip",
        description="Write the same bundle with another engine.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="a bundle's directory")
    parser.add_argument("new", metavar="NEW", type=Path, help="the directory to write; it must not exist yet")
    parser.add_argument("--engine", required=True, choices=("eager", "compile", "onnx"), help="what is to compute")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"), help="bf16 for eager and compile")
    parser.add_argument(
        "--plugins",
        action="append",
        default=[],
        metavar="FILE",
        help="registers the bundle's attention; may be repeated",
    )
    asked = parser.parse_args(argv)
    try:
        load_plugins(asked.plugins)
        difference = equip(asked.bundle, asked.new, EngineChoice(name=asked.engine, precision=asked.precision))
    except (EngineError, OSError, ZooError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return _FAULT if isinstance(error, UnfitEngineError) else _MISTAKE
    print(f"{asked.new}: engine {asked.engine} {asked.precision}, logits within {difference:.1e} of torch's")
    return 0


if __name__ == "__main__":
    sys.exit(main())
