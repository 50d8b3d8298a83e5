"""Prove, while an image is built, that the bundle in it answers its golden example as it did when it was saved.

python prove.py NAME        NAME: what the builder calls the bundle, for the error's line
"""

import sys
from pathlib import Path

from serve.errors import EngineError
from serve.predictor import Predictor
from zoo.errors import BundleError

BUNDLE = Path("/bundle")


def main(name: str, bundle: Path = BUNDLE) -> int:
    """Load it and ask it; return the exit status."""
    try:
        predictor = Predictor.from_bundle(bundle)
    except (BundleError, EngineError) as error:
        sys.stderr.write(f"error: MODEL={name}: {' '.join(str(error).split())}\n")
        return 2
    card = predictor.card
    classes = f"{len(card.class_names)} classes"
    sys.stdout.write(
        f"MODEL={name}: {card.backbone}, {classes}, answers as saved under {predictor.engine.choice.name}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
