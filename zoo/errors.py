"""What can go wrong in the zoo, for its user to mend.

ZooError (a ValueError: what the user gave does not fit)
├── UnknownNameError   a backbone, variant, scheme or pattern that nobody registered; names the nearest
├── BackboneError      a timm model that cannot be built as asked
├── SwapError          a model whose attention cannot be replaced, and why
├── PluginError        a file, module or package that should register a variant and does not, or clashes
├── BundleError        a bundle that is damaged, foreign or of another format
│   ├── UnfitEngineError    whose card names an engine that cannot compute it
│   │   └── ExportError         since its model cannot be written as ONNX
│   └── MissingPluginError  whose attention a plugin registers that was not given
├── ImageError         bytes that are not an image within the limits
└── AuditError         a model or optimizer that will not train as its owner believes

PluginWarning (a UserWarning): a plugin that is not the one a bundle was made with, or a package's that is broken.

No torch is imported here, so that `zoo.card` and `zoo.preprocess` stay light.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class ZooError(ValueError):
    """Something the user gave does not fit; the message says what, and the way out."""


class UnknownNameError(ZooError):
    """A name that is not known, with the nearest known ones."""

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "") -> None:
        self.kind, self.name = kind, name
        super().__init__(f"unknown {kind} {name!r}{did_you_mean(name, known)}{hint and '; ' + hint}")


class BackboneError(ZooError):
    """A timm model that cannot be built with the arguments given."""


class SwapError(ZooError):
    """A model whose attention cannot be replaced; nothing was changed."""


class PluginError(ZooError):
    """A plugin that cannot be loaded, or a name that it cannot have; the registry is as it was."""


class BundleError(ZooError):
    """A bundle that is damaged, of another format, or not what its card says."""


class UnfitEngineError(BundleError):
    """An engine that cannot compute a bundle's model, or computes something else."""


class ExportError(UnfitEngineError):
    """A model that cannot be written as ONNX, or a model.onnx that holds more than a model of ours does."""


class MissingPluginError(BundleError):
    """A bundle whose attention is not registered; the message says which plugin does it, and how to give it."""


class PluginWarning(UserWarning):
    """A plugin is not quite what it should be; work goes on."""


class ImageError(ZooError):
    """Bytes that are not an image, or one beyond the limits."""


class AuditError(ZooError):
    """The audit found that a model will not train as its owner believes."""


def did_you_mean(name: str, known: Iterable[str], *, most: int = 12) -> str:
    """Phrase the nearest known names for the end of an error line.

    Args:
        name: What the user wrote.
        known: The names that would have been right.
        most: Above this count, only near names are listed, not all.

    Returns:
        A clause that starts with a comma or semicolon, or "" when nothing is known.
    """
    names = sorted(known)
    near = get_close_matches(name, names, n=3, cutoff=0.6)
    if near:
        return f", did you mean {' or '.join(repr(n) for n in near)}?"
    if names and len(names) <= most:
        return f"; known are {', '.join(names)}"
    return ""
